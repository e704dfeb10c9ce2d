// A step of decoding in one layer: new keys and values go behind those that are there, and are attended to with them.

#pragma once

#include "decode.h"
#include "rounding.h"

namespace {

// One row for each sequence and head, elements apart: from one head, or sequence, to the next.
struct Heads {
  const void* first;
  int64_t head, sequence;
};

struct Step {
  int64_t sequences, heads, kv_heads, key_dim, value_dim;
  Heads q, k, v;
};

template <class T> const T* row(const Heads& heads, int64_t head, int64_t sequence) {
  return (const T*)heads.first + head * heads.head + sequence * heads.sequence;
}

template <class T> void append(const Run& run, int64_t sequence, const Step& s) {
  for (int64_t head = 0; head < s.kv_heads; ++head) {
    T* const key = (T*)run.k + head * run.k_head + (run.keys - 1) * run.k_step;
    T* const value = (T*)run.v + head * run.v_head + (run.keys - 1) * run.v_step;
    std::memcpy(key, row<T>(s.k, head, sequence), s.key_dim * sizeof(T));
    std::memcpy(value, row<T>(s.v, head, sequence), s.value_dim * sizeof(T));
  }
}

template <class T> void widen(const T* from, int64_t dim, float* to) {
  int64_t i = 0;
  for (; i + LANES <= dim; i += LANES) store(to + i, load(from + i));
  for (; i < dim; ++i) to[i] = scalar(from + i);
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
  for (int64_t i = 0; i < dim; ++i) to[i] = rounded(from[i] * factor, T{});
}

// See megakv_step.
template <class T>
void attend_step(const Step& s, const int64_t* bounds, const Run* runs, const uint8_t* stored, const int64_t* first,
                 const int64_t* seen, float scale, const float* sinks, bool partial, int threads, void* out) {
  const int64_t rows = s.sequences * s.heads;
  std::vector<float> q(rows * s.key_dim), found(rows * s.value_dim), lse(rows);
  for (int64_t sequence = 0; sequence < s.sequences; ++sequence) {
    for (int64_t head = 0; head < s.heads; ++head)
      widen(row<T>(s.q, head, sequence), s.key_dim, &q[(sequence * s.heads + head) * s.key_dim]);
    if (stored[sequence]) append<T>(runs[bounds[sequence + 1] - 1], sequence, s);
  }
  std::vector<Run> visible(runs, runs + bounds[s.sequences]);
  if (seen)
    for (int64_t i = 0; i < s.sequences; ++i)
      skip<T>(&visible[bounds[i]], visible.data() + bounds[i + 1], seen[i] - first[i]);
  const Shape shape{s.kv_heads, s.heads / s.kv_heads, (int)s.key_dim, (int)s.value_dim};
  const auto attend = [&](const float* query, const Run& run, Range heads, Range keys, State state) {
    attend_chunk<T>(query, run, shape, heads, keys, state);
  };
  decode({q.data(), visible.data(), bounds, s.sequences}, shape, scale, threads, attend, found.data(), lse.data());
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = &found[row * s.value_dim];
    if (partial) {
      float* to = (float*)out + row * (s.value_dim + 1);
      std::copy(own, own + s.value_dim, to);
      to[s.value_dim] = lse[row];
    } else {
      finish(own, s.value_dim, share(lse[row], sinks ? sinks + row % s.heads : nullptr), (T*)out + row * s.value_dim);
    }
  }
}

// See megakv_merge.
template <class T>
void merge_parts(const float* partial, int64_t parts, int64_t rows, int64_t heads, int64_t dim, const float* sinks,
                 T* out) {
  const int64_t step = rows * (dim + 1);
  std::vector<float> merged(dim);
  for (int64_t row = 0; row < rows; ++row) {
    const float* own = partial + row * (dim + 1);
    float top = own[dim], total = 0;
    for (int64_t part = 1; part < parts; ++part) top = std::max(top, own[part * step + dim]);
    const float base = finite(top);
    std::fill(merged.begin(), merged.end(), 0.0f);
    for (int64_t part = 0; part < parts; ++part) {
      const float weight = std::exp(own[part * step + dim] - base);
      total += weight;
      for (int64_t i = 0; i < dim; ++i) merged[i] += weight * own[part * step + i];
    }
    const float factor = total ? share(base + std::log(total), sinks ? sinks + row % heads : nullptr) / total : 0.0f;
    finish(merged.data(), dim, factor, out + row * dim);
  }
}

}  // namespace
