// Attention of a few query rows over many keys, for processors: each row of keys and values is read once.
//
// Decoding does few operations per byte, so memory is the limit, if nothing else is. Keys and values therefore stay in
// their type until they are in registers, the query heads that share a KV head use them while they are there, and what
// comes next is fetched meanwhile. Keys are split into chunks over threads, each with a running maximum, sum and output
// (the online softmax), which are merged at the end.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <omp.h>
#include <vector>

#include "runs.h"
#include "vectors.h"

namespace {

// Keys that are attended to between two looks at the maximum; a multiple of LANES.
constexpr int TILE = 64;
// Keys whose weighted values are summed up in one running sum: more would cost digits.
constexpr int64_t CHUNK = 8192;
// Vectors of columns of the output that are in registers at a time.
constexpr int ABREAST = 4;
// Multiplications that are not worth a second thread.
constexpr int64_t LEAST_ATTENTION = 1 << 16;

// Begins to bring the cache line that these lanes begin in: to the second level, the first one is too small for a tile.
// Spread over the computation, because a processor waits when too many lines are under way.
template <class T> __attribute__((always_inline)) inline void fetch_line(const T* lanes, int first) {
  if (first * sizeof(T) % LINE_BYTES == 0) fetch(lanes, 1);
}

// Keys or values: rows of `dim` elements, `step` apart.
template <class T> struct Rows {
  const T* first;
  int64_t step;
  int dim;
  const T* operator[](int row) const { return first + row * step; }
};

// scores[r][j] = q[r] . k[j] for R query rows; meanwhile fetches the rows from `next` on.
template <class T, int R>
void score(const float* q, int q_step, Rows<T> k, int count, float* scores, const T* next) {
  const int whole = k.dim / LANES * LANES;
  for (int j = 0; j < count; j += 4) {
    // Beyond the last key the last one is taken again.
    const T* key[4];
    for (int i = 0; i < 4; ++i) {
      const int row = std::min(j + i, count - 1);
      key[i] = k[row];
    }
    Floats sum[R][4] = {};
    for (int d = 0; d < whole; d += LANES) {
      const Floats a = load(key[0] + d), b = load(key[1] + d), c = load(key[2] + d), e = load(key[3] + d);
      if (next)
        for (int i = 0; i < 4; ++i) fetch_line(key[i] + (next - k.first) + d, d);
      for (int r = 0; r < R; ++r) {
        const Floats query = load(q + r * q_step + d);
        sum[r][0] += query * a;
        sum[r][1] += query * b;
        sum[r][2] += query * c;
        sum[r][3] += query * e;
      }
    }
    for (int r = 0; r < R; ++r) {
      Four total = sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
      for (int d = whole; d < k.dim; ++d) {
        const float query = q[r * q_step + d];
        total += query * Four{scalar(key[0] + d), scalar(key[1] + d), scalar(key[2] + d), scalar(key[3] + d)};
      }
      std::memcpy(scores + r * TILE + j, &total, sizeof total);
    }
  }
}

// out[r][c] = keep[r] * out[r][c] + sum over j of weights[r][j] * v[j][c] for R query rows and C vectors of columns.
template <class T, int R, int C>
void accumulate(const float* weights, const float* keep, Rows<T> v, int column, int count, float* out,
                const T* next) {
  Floats sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = load(out + r * v.dim + column + c * LANES) * keep[r];
  for (int j = 0; j < count; ++j) {
    Floats value[C];
    for (int c = 0; c < C; ++c) value[c] = load(v[j] + column + c * LANES);
    if (next)
      for (int c = 0; c < C; ++c) fetch_line(next + j * v.step + column + c * LANES, column + c * LANES);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sum[r][c] += weights[r * TILE + j] * value[c];
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) std::memcpy(out + r * v.dim + column + c * LANES, &sum[r][c], sizeof(Floats));
}

// What scores are compared with: where all of them have overflowed, their weights are 0, not infinity minus infinity.
float finite(float top) { return top == -std::numeric_limits<float>::infinity() ? 0.0f : top; }

// The online softmax of some query rows: what they have seen so far.
struct State {
  float* out;
  float* top;
  float* total;
};

template <class T, int R>
void attend(const float* q, int q_step, Rows<T> k, Rows<T> v, int count, State state, const T* next_k,
            const T* next_v) {
  alignas(64) float weights[R * TILE];
  float keep[R];
  score<T, R>(q, q_step, k, count, weights, next_k);
  for (int r = 0; r < R; ++r) {
    float* row = weights + r * TILE;
    const int padded = (count + LANES - 1) / LANES * LANES;
    for (int j = count; j < padded; ++j) row[j] = -std::numeric_limits<float>::infinity();
    Floats most = load(row);
    for (int j = LANES; j < padded; j += LANES) {
      const Floats each = load(row + j);
      most = each > most ? each : most;
    }
    float top = state.top[r];
    for (int i = 0; i < LANES; ++i) top = std::max(top, most[i]);
    const float base = finite(top);
    Floats total = {};
    for (int j = 0; j < padded; j += LANES) {
      const Floats weight = exponential(load(row + j) - base);
      total += weight;
      std::memcpy(row + j, &weight, sizeof weight);
    }
    const Four four = folded(total);
    keep[r] = std::exp(state.top[r] - base);
    state.total[r] = state.total[r] * keep[r] + (four[0] + four[1] + four[2] + four[3]);
    state.top[r] = top;
  }
  int column = 0;
  for (; column + ABREAST * LANES <= v.dim; column += ABREAST * LANES)
    accumulate<T, R, ABREAST>(weights, keep, v, column, count, state.out, next_v);
  for (; column + LANES <= v.dim; column += LANES)
    accumulate<T, R, 1>(weights, keep, v, column, count, state.out, next_v);
  for (; column < v.dim; ++column)
    for (int r = 0; r < R; ++r) {
      float sum = state.out[r * v.dim + column] * keep[r];
      for (int j = 0; j < count; ++j) sum += weights[r * TILE + j] * scalar(v[j] + column);
      state.out[r * v.dim + column] = sum;
    }
}

struct Shape {
  int64_t kv_heads, rows;  // query rows of a KV head
  int key_dim, value_dim;
};

struct Range {
  int64_t begin, end;
};

// The query rows of a head over the keys and values of a tile, and what comes after them.
template <class T> struct Tile {
  Rows<T> keys, values;
  int count;
  const T *next_k, *next_v;
};

template <class T> void attend_head(const float* q, const Shape& s, int64_t head, const Tile<T>& tile, State state) {
  for (int64_t row = 0; row < s.rows;) {
    const int64_t index = head * s.rows + row, left = s.rows - row;
    const State own{state.out + index * s.value_dim, state.top + index, state.total + index};
    const float* query = q + index * s.key_dim;
    const T* fetch_k = row ? nullptr : tile.next_k;
    const T* fetch_v = row ? nullptr : tile.next_v;
    if (left >= BLOCK_ROWS) {
      attend<T, BLOCK_ROWS>(query, s.key_dim, tile.keys, tile.values, tile.count, own, fetch_k, fetch_v);
      row += BLOCK_ROWS;
    } else if (left >= 2) {
      attend<T, 2>(query, s.key_dim, tile.keys, tile.values, tile.count, own, fetch_k, fetch_v);
      row += 2;
    } else {
      attend<T, 1>(query, s.key_dim, tile.keys, tile.values, tile.count, own, fetch_k, fetch_v);
      row += 1;
    }
  }
}

// Some heads over some keys, tile by tile: in memory, heads may lie side by side within a token.
template <class T>
void attend_chunk(const float* q, const Run& run, const Shape& s, Range heads, Range seen, State state) {
  const T *k = (const T*)run.k, *v = (const T*)run.v;
  for (int64_t first = seen.begin; first < seen.end; first += TILE) {
    const int count = (int)std::min<int64_t>(TILE, seen.end - first);
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const Rows<T> keys{k + head * run.k_head + first * run.k_step, run.k_step, s.key_dim};
      const Rows<T> values{v + head * run.v_head + first * run.v_step, run.v_step, s.value_dim};
      // What comes after this: the next head's rows, or after the last head the first one's next tile.
      const bool last = head + 1 == heads.end;
      const T* next_k = last ? k + heads.begin * run.k_head + (first + TILE) * run.k_step : keys.first + run.k_head;
      const T* next_v = last ? v + heads.begin * run.v_head + (first + TILE) * run.v_step : values.first + run.v_head;
      if (last && first + TILE >= seen.end) next_k = next_v = nullptr;
      attend_head<T>(q, s, head, {keys, values, count, next_k, next_v}, state);
    }
  }
}

struct Input {
  const float* q;
  const Run* runs;
  const int64_t* bounds;
  int64_t sequences;
  Runs of(int64_t sequence) const { return {runs + bounds[sequence], runs + bounds[sequence + 1]}; }
};

// Some of a sequence's keys, counted over its runs.
struct Chunk {
  int64_t sequence;
  Range keys;
};

// Chunks that give every worker about the same, none of them too long to sum up.
std::vector<Chunk> divided(const std::vector<int64_t>& lengths, int64_t workers) {
  int64_t total = 0;
  for (const int64_t keys : lengths) total += keys;
  const int64_t share = (total + workers - 1) / workers, most = std::min(CHUNK, (share + TILE - 1) / TILE * TILE);
  std::vector<Chunk> chunks;
  for (size_t sequence = 0; sequence < lengths.size(); ++sequence) {
    const int64_t keys = lengths[sequence], tiles = (keys + TILE - 1) / TILE;
    const int64_t parts = keys ? (keys + most - 1) / most : 0;
    for (int64_t i = 0; i < parts; ++i)
      chunks.push_back({(int64_t)sequence, {tiles * i / parts * TILE, std::min(keys, tiles * (i + 1) / parts * TILE)}});
  }
  return chunks;
}

// `attend(q, run, heads, keys, state)` does a thread's part of the work.
template <class Attend>
void decode(const Input& input, const Shape& s, float scale, int threads, Attend attend, float* out, float* lse) {
  const int64_t rows = s.kv_heads * s.rows, all = input.sequences * rows;
  std::vector<int64_t> lengths(input.sequences);
  int64_t total = 0;
  for (int64_t sequence = 0; sequence < input.sequences; ++sequence) {
    for (const Run& run : input.of(sequence)) lengths[sequence] += run.keys;
    total += lengths[sequence];
  }
  const int64_t workers = total * rows * (s.key_dim + s.value_dim) < LEAST_ATTENTION ? 1 : threads;
  const std::vector<Chunk> chunks = divided(lengths, workers);
  const int64_t count = chunks.size();
  const int64_t head_parts = count ? std::min(s.kv_heads, (workers + count - 1) / count) : 0;
  std::vector<float> scaled(all * s.key_dim), totals(count * rows);
  std::vector<float> tops(count * rows, -std::numeric_limits<float>::infinity()), outs(count * rows * s.value_dim);
  for (size_t i = 0; i < scaled.size(); ++i) scaled[i] = input.q[i] * scale;
#pragma omp parallel for num_threads(workers) schedule(dynamic, 1)
  for (int64_t index = 0; index < count * head_parts; ++index) {
    const int64_t own = index / head_parts, head_part = index % head_parts;
    const Chunk& chunk = chunks[own];
    const Range heads{s.kv_heads * head_part / head_parts, s.kv_heads * (head_part + 1) / head_parts};
    const State state{&outs[own * rows * s.value_dim], &tops[own * rows], &totals[own * rows]};
    const float* query = &scaled[chunk.sequence * rows * s.key_dim];
    int64_t passed = 0;
    for (const Run& run : input.of(chunk.sequence)) {
      const Range part{std::max<int64_t>(chunk.keys.begin - passed, 0), std::min(chunk.keys.end - passed, run.keys)};
      if (part.begin < part.end) attend(query, run, heads, part, state);
      passed += run.keys;
    }
  }
  std::fill(out, out + all * s.value_dim, 0.0f);
  std::fill(lse, lse + all, -std::numeric_limits<float>::infinity());
  for (int64_t first = 0, end = 0; first < count; first = end) {
    const int64_t sequence = chunks[first].sequence;
    while (end < count && chunks[end].sequence == sequence) ++end;
    for (int64_t row = 0; row < rows; ++row) {
      float top = tops[first * rows + row], sum = 0;
      for (int64_t chunk = first; chunk < end; ++chunk) top = std::max(top, tops[chunk * rows + row]);
      float* target = out + (sequence * rows + row) * s.value_dim;
      for (int64_t chunk = first; chunk < end; ++chunk) {
        const float share = std::exp(tops[chunk * rows + row] - finite(top));
        const float* source = &outs[(chunk * rows + row) * s.value_dim];
        sum += share * totals[chunk * rows + row];
        for (int i = 0; i < s.value_dim; ++i) target[i] += share * source[i];
      }
      if (sum == 0) continue;
      for (int i = 0; i < s.value_dim; ++i) target[i] /= sum;
      lse[sequence * rows + row] = top + std::log(sum);
    }
  }
}

}  // namespace
