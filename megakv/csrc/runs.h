// Keys and values of a sequence, which lie in runs.

#pragma once

#include <algorithm>
#include <cstdint>

#include "faults.h"

namespace {

// Those that lie at one distance from each other: elements from one head, or key, to the next, and to the end of memory.
struct Run {
  const void *k, *v;
  int64_t keys, k_head, k_step, v_head, v_step, k_size, v_size;
};

struct Runs {
  const Run *first, *last;
  const Run* begin() const { return first; }
  const Run* end() const { return last; }
  int64_t keys() const {
    int64_t sum = 0;
    for (const Run& run : *this) sum += run.keys;
    return sum;
  }

  // Whether memory holds what they say, of so many heads.
  void check(int64_t heads, int64_t key_dim, int64_t value_dim) const {
    for (const Run& run : *this)
      require(within(run.k_size, heads, run.k_head, run.keys, run.k_step, key_dim) &&
                  within(run.v_size, heads, run.v_head, run.keys, run.v_step, value_dim),
              Fault::RUNS);
  }
};

// Where a head's keys and values lie, one after another from a given one on.
template <class T> class Walk {
 public:
  Walk(Runs runs, int64_t head, int64_t first) : run(runs.first), last(runs.last), head(head), at(first) { settle(); }

  // Of so many of the next ones, which must be there.
  void take(int64_t count, const T** keys, const T** values) {
    while (count) {
      const T* const k = (const T*)run->k + head * run->k_head;
      const T* const v = (const T*)run->v + head * run->v_head;
      const int64_t end = std::min(run->keys, at + count);
      count -= end - at;
      for (; at < end; ++at) *keys++ = k + at * run->k_step, *values++ = v + at * run->v_step;
      settle();
    }
  }

 private:
  void settle() {
    for (; run < last && at >= run->keys; ++run) at -= run->keys;
  }

  const Run *run, *last;
  int64_t head, at;
};

}  // namespace
