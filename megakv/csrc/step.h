// A step of a few rows in one layer: new keys and values go behind those that are there, and are attended to with them.

#pragma once

#include <numeric>

#include "decode.h"
#include "prefill.h"
#include "rounding.h"

namespace {

// Rows of all heads, elements apart: from one head, or row, to the next.
struct Heads {
  const void* first;
  int64_t head, row;
};

// Some of the rows, ascending; none are all of them.
struct Picked {
  const int64_t* rows;
  int64_t count;

  void check(int64_t all) const {
    require(count >= 0 && count <= all, Fault::ROWS);
    for (int64_t i = 0; rows && i < count; ++i) require(rows[i] > (i ? rows[i - 1] : -1) && rows[i] < all, Fault::ROWS);
  }
};

// Rows of queries of a KV head up to which weights are not rounded, as where a kernel of their own attends to them.
constexpr int64_t FEW_QUERIES = 32;

struct Step {
  int64_t pairs;  // as of a `many::Problem`, for sequences with many rows
  int64_t rows, heads, kv_heads, key_dim, value_dim;
  Heads q, k, v;
};

// Where every sequence's keys and values lie, and its new rows: see megakv_step.
struct Held {
  int64_t sequences;
  const int64_t* begins;
  const uint8_t* stored;
  const int64_t* seen;
  int64_t marks, windows;  // as many rows are marked as stored or not, and have a window where one is given
  int64_t held;            // sequences of the table that follows
  const int64_t *bounds, *first;
  const Run* runs;
  int64_t run_count;

  Runs of(int64_t sequence) const { return {runs + bounds[sequence], runs + bounds[sequence + 1]}; }

  void check(int64_t rows, int64_t kv_heads, int64_t key_dim, int64_t value_dim) const {
    require(divides(begins, sequences + 1, sequences, rows) && begins[0] == 0 && begins[sequences] == rows, Fault::ROWS);
    require(marks == rows && (!seen || windows == rows), Fault::ROWS);
    require(divides(bounds, held + 1, sequences, run_count), Fault::SEQUENCES);
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
      of(sequence).check(kv_heads, key_dim, value_dim);
      const uint8_t *const first = stored + begins[sequence], *const last = stored + begins[sequence + 1];
      require(std::accumulate(first, last, (int64_t)0) <= of(sequence).keys(), Fault::RUNS);
    }
  }
};

template <class T> const T* row(const Heads& heads, int64_t head, int64_t row) {
  return (const T*)heads.first + head * heads.head + row * heads.row;
}

// A new row becomes the last one but so many of a sequence's runs.
template <class T> void append(const Run* run, int64_t behind, int64_t index, const Step& s) {
  for (; behind >= run->keys; --run) behind -= run->keys;
  const int64_t place = run->keys - 1 - behind;
  for (int64_t head = 0; head < s.kv_heads; ++head) {
    T* const key = (T*)run->k + head * run->k_head + place * run->k_step;
    T* const value = (T*)run->v + head * run->v_head + place * run->v_step;
    std::memcpy(key, row<T>(s.k, head, index), s.key_dim * sizeof(T));
    std::memcpy(value, row<T>(s.v, head, index), s.value_dim * sizeof(T));
  }
}

template <class T> void widen(const T* from, int64_t dim, float* to) {
  each_vector(0, dim, [&](int64_t i, int64_t lanes) { store_rounded(to + i, some(from + i, lanes), lanes); });
}

// Without the first keys of a sequence.
template <class T> void skip(Run* run, const Run* end, int64_t keys) {
  for (; run < end && keys > 0; ++run) {
    const int64_t gone = std::min(keys, run->keys);
    run->k = (const T*)run->k + gone * run->k_step;
    run->v = (const T*)run->v + gone * run->v_step;
    run->keys -= gone;
    keys -= gone;
  }
}

// Rescaled by a key that is always visible and has value zero.
float share(float lse, const float* sink) { return sink ? 1.0f / (1.0f + std::exp(*sink - lse)) : 1.0f; }

template <class T> void finish(const float* from, int64_t dim, float factor, T* to) {
  each_vector(0, dim, [&](int64_t i, int64_t lanes) { store_rounded(to + i, some(from + i, lanes) * factor, lanes); });
}

// What rows of queries found: [rows, heads, value_dim], and the log-sum-exp of each.
struct Found {
  std::vector<float> out, lse;

  Found(const Step& s, int64_t rows)
      : out(rows * s.heads * s.value_dim), lse(rows * s.heads, -std::numeric_limits<float>::infinity()) {}
};

// A row of queries that is attended to with others: where it is, and the keys of its sequence that it does not see.
struct Single {
  int64_t query, low;
  Runs runs;
};

// Rows that see all keys to the end of their sequences: all of them at once.
template <class T>
void attend_singles(const Step& s, const std::vector<Single>& singles, float scale, int threads, Found& found) {
  const int64_t count = singles.size(), width = s.heads * s.value_dim;
  if (!count) return;
  std::vector<float> q(count * s.heads * s.key_dim);
  std::vector<Run> visible;
  std::vector<int64_t> bounds{0};
  for (int64_t i = 0; i < count; ++i) {
    const Single& own = singles[i];
    for (int64_t head = 0; head < s.heads; ++head)
      widen(row<T>(s.q, head, own.query), s.key_dim, &q[(i * s.heads + head) * s.key_dim]);
    visible.insert(visible.end(), own.runs.begin(), own.runs.end());
    bounds.push_back(visible.size());
    skip<T>(visible.data() + bounds[i], visible.data() + bounds[i + 1], own.low);
  }
  const Shape shape{s.kv_heads, s.heads / s.kv_heads, (int)s.key_dim, (int)s.value_dim};
  const auto attend = [&](const float* query, const Run& run, Range heads, Range keys, State state) {
    attend_chunk<T>(query, run, shape, heads, keys, state);
  };
  Found own(s, count);
  decode({q.data(), visible.data(), bounds.data(), count}, shape, scale, threads, attend, own.out.data(), own.lse.data());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = singles[i].query;
    std::copy_n(&own.out[i * width], width, &found.out[index * width]);
    std::copy_n(&own.lse[i * s.heads], s.heads, &found.lse[index * s.heads]);
  }
}

// The rows [begin, end) of one sequence, each of which sees its keys from `low` to before `high`.
template <class T>
void attend_several(const Step& s, Runs runs, int64_t begin, int64_t end, const int64_t* low, const int64_t* high,
                    float scale, int threads, Found& found) {
  many::Problem p{};
  p.kv_heads = s.kv_heads, p.group = s.heads / s.kv_heads, p.rows = end - begin, p.keys = runs.keys();
  p.key_dim = s.key_dim, p.value_dim = s.value_dim, p.q_head = s.q.head, p.q_step = s.q.row;
  p.low = low + begin, p.high = high + begin, p.scale = scale;
  with_cell<T>(s.pairs && p.group * p.rows > FEW_QUERIES, [&](auto cell) {
    many::prefill<T, decltype(cell)>(p, row<T>(s.q, 0, begin), runs, threads,
                                     &found.out[begin * s.heads * s.value_dim], &found.lse[begin * s.heads]);
  });
}

// What rows see of their sequences' keys: those from `low` to before `high`. Sequence i has rows [begins[i], begins[i + 1]).
struct Seen {
  std::vector<int64_t> begins, low, high;

  // The same of some of the rows, ascending.
  Seen of(const Picked& picked) const {
    Seen some;
    for (int64_t begin : begins)
      some.begins.push_back(std::lower_bound(picked.rows, picked.rows + picked.count, begin) - picked.rows);
    for (int64_t i = 0; i < picked.count; ++i) {
      some.low.push_back(low[picked.rows[i]]);
      some.high.push_back(high[picked.rows[i]]);
    }
    return some;
  }
};

// The new rows go to their places; of this rank's keys each sees those that do not come behind it.
template <class T> Seen append_all(const Step& s, const Held& held) {
  Seen seen{{held.begins, held.begins + held.sequences + 1}, std::vector<int64_t>(s.rows), std::vector<int64_t>(s.rows)};
  for (int64_t sequence = 0; sequence < held.sequences; ++sequence) {
    const Runs runs = held.of(sequence);
    const int64_t begin = held.begins[sequence], end = held.begins[sequence + 1], keys = runs.keys();
    // Those that this rank keeps lie last.
    int64_t kept = 0;
    for (int64_t index = begin; index < end; ++index) kept += held.stored[index];
    for (int64_t index = begin; index < end; ++index) {
      if (held.stored[index]) append<T>(runs.last - 1, --kept, index, s);
      seen.low[index] = held.seen ? held.seen[index] - held.first[sequence] : 0;
      seen.high[index] = keys - kept;
    }
  }
  return seen;
}

// Queries of all rows that are `seen`, to the runs of their sequences: see megakv_step.
template <class T, class RunsOf>
void attend_rows(const Step& s, const Seen& seen, RunsOf runs_of, float scale, const float* sinks, bool partial,
                 int threads, void* out) {
  const int64_t rows = seen.low.size();
  Found found(s, rows);
  std::vector<Single> singles;
  for (int64_t sequence = 0; sequence + 1 < (int64_t)seen.begins.size(); ++sequence) {
    const int64_t begin = seen.begins[sequence], end = seen.begins[sequence + 1];
    if (begin == end) continue;
    const Runs runs = runs_of(sequence);
    if (end - begin == 1 && seen.high[begin] == runs.keys())
      singles.push_back({begin, seen.low[begin], runs});
    else
      attend_several<T>(s, runs, begin, end, seen.low.data(), seen.high.data(), scale, threads, found);
  }
  attend_singles<T>(s, singles, scale, threads, found);
  for (int64_t row = 0; row < rows * s.heads; ++row) {
    const float* own = &found.out[row * s.value_dim];
    if (partial) {
      float* to = (float*)out + row * (s.value_dim + 1);
      std::copy(own, own + s.value_dim, to);
      to[s.value_dim] = found.lse[row];
    } else {
      finish(own, s.value_dim, share(found.lse[row], sinks ? sinks + row % s.heads : nullptr),
             (T*)out + row * s.value_dim);
    }
  }
}

// See megakv_step.
template <class T>
void attend_step(const Step& s, const Held& held, float scale, const float* sinks, bool partial, int threads, void* out) {
  const auto runs_of = [&](int64_t sequence) { return held.of(sequence); };
  attend_rows<T>(s, append_all<T>(s, held), runs_of, scale, sinks, partial, threads, out);
}

// See megakv_merge.
template <class T>
void merge_parts(const float* partial, int64_t parts, int64_t rows, int64_t heads, int64_t dim, const float* sinks,
                 T* out) {
  const int64_t step = rows * (dim + 1);
  std::vector<float> merged(dim), weights(parts);
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = partial + row * (dim + 1);
    float top = own[dim], total = 0;
    for (int64_t part = 1; part < parts; ++part) top = std::max(top, own[part * step + dim]);
    const float base = finite(top);
    for (int64_t part = 0; part < parts; ++part) total += weights[part] = std::exp(own[part * step + dim] - base);
    each_vector(0, dim, [&](int64_t i, int64_t lanes) {
      Floats sum{};
      for (int64_t part = 0; part < parts; ++part) sum += weights[part] * some(own + part * step + i, lanes);
      store_rounded(&merged[i], sum, lanes);
    });
    const float factor = total ? share(base + std::log(total), sinks ? sinks + row % heads : nullptr) / total : 0.0f;
    finish(merged.data(), dim, factor, out + row * dim);
  }
}

}  // namespace
