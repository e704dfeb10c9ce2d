// Attention of many query rows, for processors: flash attention whose products run at the rate of multiply-adds.
//
// A block of query rows, of all heads that share a KV head, meets a tile of keys at a time. Keys and values of a tile
// are made cells once for the block: numbers of float32, so that weights lose nothing, and a processor that has their
// multiply-adds twice as often as those of pairs of bfloat16 is as fast; or such pairs. Scores are held with query rows
// in the lanes of vectors, so that maxima and sums over keys, masks and exponentials need no work across lanes, and
// neither keys nor weights are transposed.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <new>
#include <omp.h>
#include <vector>

#include "cells.h"
#include "products.h"
#include "runs.h"
#include "vectors.h"

namespace {

// Of which other kernels have names, too.
namespace many {

// Keys of a tile, and query rows of a panel: a tile of 64 columns and the scores of a panel lie in the first cache.
constexpr int TILE = 64;
constexpr int PANEL = 64;
constexpr int VECTORS = PANEL / LANES;
// Columns that are summed up at a time: more would drive a panel's queries out of the first cache.
constexpr int DEPTH = 128;
// Elements of queries and outputs that a block of rows may have: many, because each block widens its keys again, but
// few enough for the second cache.
constexpr int64_t BLOCK_ELEMENTS = 96 << 10;
// Multiplications that are not worth a second thread.
constexpr int64_t LEAST_WORK = 1 << 19;
constexpr double LOG2E = 1.44269504088896341, LN2 = 0.693147180559945309;
constexpr float INFINITE = std::numeric_limits<float>::infinity();

struct Problem {
  int64_t type;   // 0 float32, 1 bfloat16, 2 float16
  int64_t pairs;  // bfloat16 is multiplied as it is, by pairs, and weights are rounded to it
  int64_t kv_heads, group, rows, keys, key_dim, value_dim;
  // Elements of queries from one head, or token, to the next, and to the end of memory.
  int64_t q_head, q_step, q_size;
  // [rows] each: row i sees keys low[i] to high[i] - 1. None: keys up to i, where it is causal, or else all.
  int64_t causal;
  const int64_t *low, *high;
  // slopes[head] * (k_positions[key] - q_slots[row]) is added to scores: [kv_heads * group], [rows], [keys], or none.
  const float* slopes;
  const int64_t *q_slots, *k_positions;
  double scale, cap;  // A scaled score s becomes cap * tanh(s / cap); 0: none.
  // Bytes of the five tables.
  int64_t low_bytes, high_bytes, slopes_bytes, q_slots_bytes, k_positions_bytes;

  void check(Runs runs) const {
    require(kv_heads > 0 && group > 0 && keys >= 0 && keys <= INT32_MAX, Fault::SIZES);
    require(within(q_size, kv_heads * group, q_head, rows, q_step, key_dim), Fault::ROWS);
    require(!high || (low && low_bytes / 8 == rows && high_bytes / 8 == rows), Fault::ROWS);
    require(!slopes || (slopes_bytes / 4 == kv_heads * group && q_slots_bytes / 8 == rows), Fault::ROWS);
    require(!slopes || k_positions_bytes / 8 == keys, Fault::ROWS);
    runs.check(kv_heads, key_dim, value_dim);
    require(runs.keys() == keys, Fault::RUNS);
  }
};

// Lines of the cache that so many cells take.
inline int64_t lines(int64_t cells) { return (cells + 15) / 16; }

inline int padded(int64_t count, int multiple) { return (int)((count + multiple - 1) / multiple * multiple); }

// Query rows [first, first + count) of a KV head, of one block; a row is a token's query of one head of the group.
struct Panel {
  int count, vectors;
  int64_t least_low, most_low, least_high, most_high;
  alignas(64) int32_t low[PANEL], high[PANEL];
  alignas(64) float slope[PANEL], slot[PANEL];
  alignas(64) float top[PANEL], total[PANEL], keep[PANEL];
};

// Vectors that begin where a line of the cache does are read at once.
struct alignas(64) Line { unsigned char bytes[64]; };

struct Buffers {
  std::vector<Line> queries, keys, values, scores, outputs;
  std::vector<Panel> panels;
};

inline void prepare(const Problem& p, int64_t head, int64_t first, Panel& panel) {
  panel.vectors = padded(panel.count, LANES) / LANES;
  panel.least_low = panel.least_high = p.keys;
  panel.most_low = panel.most_high = 0;
  for (int r = 0; r < PANEL; ++r) {
    int64_t low = 0, high = p.keys;
    // Lanes without a row see what the last row sees.
    const int64_t index = first + std::min(r, panel.count - 1), row = index / p.group;
    if (p.slopes && p.keys) {
      panel.slope[r] = p.slopes[head * p.group + index % p.group];
      panel.slot[r] = (float)(p.q_slots[row] - p.k_positions[0]);
    }
    if (p.causal) high = std::min(row + 1, p.keys);
    if (p.high) {
      low = std::max<int64_t>(p.low[row], 0), high = std::min(p.high[row], p.keys);
      // A blind row adds nothing to what its block sees.
      if (low >= high) low = p.keys, high = 0;
    }
    panel.low[r] = (int32_t)low, panel.high[r] = (int32_t)high;
    panel.least_low = std::min(panel.least_low, low), panel.most_low = std::max(panel.most_low, low);
    panel.least_high = std::min(panel.least_high, high), panel.most_high = std::max(panel.most_high, high);
    panel.top[r] = -INFINITE, panel.total[r] = 0;
  }
}

inline Ints load_ints(const int32_t* from) {
  Ints value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Scores from products: keys [begin, begin + count) of a panel.
inline void adjust(const Problem& p, const Panel& panel, int64_t begin, int count, float* scores) {
  const float scale = (float)p.scale, cap = (float)p.cap;
  for (int j = 0; j < count; ++j) {
    const float position = p.slopes ? (float)(p.k_positions[begin + j] - p.k_positions[0]) : 0;
    for (int c = 0; c < panel.vectors; ++c) {
      float* const at = scores + j * PANEL + c * LANES;
      Floats score = load(at) * scale;
      if (cap) score = cap * hyperbolic_tangent(score / cap);
      if (p.slopes) score += load(panel.slope + c * LANES) * (position - load(panel.slot + c * LANES));
      store(at, score);
    }
  }
}

// Scores of hidden keys become -infinity: keys [begin, begin + count) of a panel.
inline void hide(const Panel& panel, int64_t begin, int count, float* scores) {
  for (int c = 0; c < panel.vectors; ++c) {
    const Ints low = load_ints(panel.low + c * LANES) - (int32_t)begin;
    const Ints high = load_ints(panel.high + c * LANES) - (int32_t)begin;
    for (int j = 0; j < count; ++j) {
      float* const at = scores + j * PANEL + c * LANES;
      const Ints seen = (low <= j) & (high > j);
      store(at, seen ? load(at) : all(-INFINITE));
    }
  }
}

// Softmax of a panel over a tile: weights' cells in place of scores, and what is kept of earlier tiles.
template <class Cell> void weigh(Panel& panel, int count, float factor, float* scores) {
  for (int c = 0; c < panel.vectors; ++c) {
    const float* const column = scores + c * LANES;
    Cell* const weights = (Cell*)scores + c * LANES;
    const Floats before = load(panel.top + c * LANES);
    Floats most[4] = {before, before, before, before};
    int j = 0;
    for (; j + 4 <= count; j += 4)
      for (int i = 0; i < 4; ++i) most[i] = larger(load(column + (j + i) * PANEL), most[i]);
    for (; j < count; ++j) most[0] = larger(load(column + j * PANEL), most[0]);
    const Floats top = larger(larger(most[0], most[1]), larger(most[2], most[3]));
    // Where nothing was seen yet, weights are 0, not infinity minus infinity.
    const Floats base = top == -INFINITE ? Floats{} : top;
    const Floats scaled = base * factor, keep = power_of_two(before * factor - scaled);
    Floats total[2] = {load(panel.total + c * LANES) * keep, Floats{}};
    const auto weight = [&](int j) { return power_of_two(load(column + j * PANEL) * factor - scaled); };
    for (j = 0; j + 2 <= count; j += 2) {
      const Floats first = weight(j), second = weight(j + 1);
      total[0] += first, total[1] += second;
      store_weights(weights + j / NUMBERS<Cell> * PANEL, PANEL, first, second);
    }
    if (j < count) {
      const Floats last = weight(j);
      total[0] += last;
      // A tile has room for an even number of keys.
      store_weights(weights + j / NUMBERS<Cell> * PANEL, PANEL, last, Floats{});
    }
    store(panel.keep + c * LANES, keep);
    store(panel.total + c * LANES, total[0] + total[1]);
    store(panel.top + c * LANES, top);
  }
}

// Query rows [first, end) of a KV head.
template <class T, class Cell>
void attend(const Problem& p, const void* q, Runs runs, int64_t head, int64_t first, int64_t end, Buffers& buffers,
            float* out, float* lse) {
  const bool plain = !p.cap && !p.slopes;
  // Scores become exponents of 2.
  const double factor = plain ? p.scale * LOG2E : LOG2E;
  const int dim = (int)p.key_dim, value_width = padded(p.value_dim, LANES), cells = in_cells<Cell>(dim);
  const int count = padded(end - first, PANEL) / PANEL;
  int64_t low = p.keys, high = 0;
  Cell *const all_queries = (Cell*)buffers.queries.data(), *const keys = (Cell*)buffers.keys.data();
  Cell *const values = (Cell*)buffers.values.data(), *const query = keys;
  float *const scores = (float*)buffers.scores.data(), *const all_outputs = (float*)buffers.outputs.data();
  for (int i = 0; i < count; ++i) {
    Panel& panel = buffers.panels[i];
    const int64_t row = first + i * PANEL;
    panel.count = (int)std::min<int64_t>(PANEL, end - row);
    prepare(p, head, row, panel);
    low = std::min(low, panel.least_low), high = std::max(high, panel.most_high);
    Cell* const queries = all_queries + (int64_t)i * PANEL * cells;
    for (int r = 0; r < panel.vectors * LANES; ++r) {
      // Lanes without a row have the last one's queries.
      const int64_t own = row + std::min(r, panel.count - 1), token = own / p.group;
      pack((const T*)q + (head * p.group + own % p.group) * p.q_head + token * p.q_step, dim, query, cells);
      for (int d = 0; d < cells; ++d) queries[d * PANEL + r] = query[d];
    }
  }
  std::fill_n(all_outputs, (int64_t)count * PANEL * value_width, 0.0f);
  // Where a tile's keys and values lie, and those of the next one.
  const T *own_keys[2][TILE], *own_values[2][TILE];
  Walk<T> walk(runs, head, low);
  int next = (int)std::clamp<int64_t>(high - low, 0, TILE), turn = 0;
  walk.take(next, own_keys[turn], own_values[turn]);
  for (int64_t begin = low; begin < high; begin += TILE, turn = 1 - turn) {
    const int tile = next;
    for (int j = 0; j < tile; ++j) pack(own_keys[turn][j], dim, keys + j * cells, cells);
    pack_columns(own_values[turn], tile, (int)p.value_dim, values, value_width);
    next = (int)std::clamp<int64_t>(high - begin - TILE, 0, TILE);
    walk.take(next, own_keys[1 - turn], own_values[1 - turn]);
    for (int i = 0; i < count; ++i) {
      // Meanwhile a part of the next tile is fetched.
      for (int j = i * next / count; j < (i + 1) * next / count; ++j) {
        fetch(own_keys[1 - turn][j], p.key_dim);
        fetch(own_values[1 - turn][j], p.value_dim);
      }
      Panel& panel = buffers.panels[i];
      if (panel.most_high <= begin || panel.least_low >= begin + tile) continue;
      const int seen = (int)std::min<int64_t>(tile, panel.most_high - begin);
      const Cell* const queries = all_queries + (int64_t)i * PANEL * cells;
      float* const outputs = all_outputs + (int64_t)i * PANEL * value_width;
      for (int d = 0; d < cells; d += DEPTH)
        multiply<Before::KEPT>(seen, panel.vectors, keys + d, cells, 1, queries + (int64_t)d * PANEL, PANEL,
                        std::min(DEPTH, cells - d), scores, PANEL, panel.keep, d == 0);
      if (!plain) adjust(p, panel, begin, seen, scores);
      if (panel.most_low > begin || panel.least_high < begin + seen) hide(panel, begin, seen, scores);
      weigh<Cell>(panel, seen, (float)factor, scores);
      multiply<Before::SCALED>(panel.count, value_width / LANES, (const Cell*)scores, 1, PANEL, values, value_width,
                     in_cells<Cell>(seen), outputs, value_width, panel.keep, false);
    }
  }
  for (int i = 0; i < count; ++i) {
    const Panel& panel = buffers.panels[i];
    for (int r = 0; r < panel.count; ++r) {
      const int64_t row = first + i * PANEL + r;
      const int64_t index = row / p.group * p.kv_heads * p.group + head * p.group + row % p.group;
      const float* const from = all_outputs + ((int64_t)i * PANEL + r) * value_width;
      const bool blind = panel.top[r] == -INFINITE;
      for (int d = 0; d < p.value_dim; ++d) out[index * p.value_dim + d] = blind ? 0.0f : from[d] / panel.total[r];
      lse[index] = blind ? -INFINITE : (float)((panel.top[r] * factor + std::log2((double)panel.total[r])) * LN2);
    }
  }
}

// Of keys and values that lie in runs, one after another: `p.keys` in all.
template <class T, class Cell>
void prefill(const Problem& p, const void* q, Runs runs, int threads, float* out, float* lse) {
  const int64_t rows = p.rows * p.group, value_width = padded(p.value_dim, LANES);
  if (!rows) return;
  if (p.kv_heads * rows * p.keys * (p.key_dim + p.value_dim) < LEAST_WORK) threads = 1;
  const int64_t most = std::max<int64_t>(BLOCK_ELEMENTS / (p.key_dim + value_width) / PANEL * PANEL, PANEL);
  // Several blocks for each of some threads, because a mask makes them unequal; where they are few, as many for each.
  const int64_t wanted = threads > 1 ? (4 * threads + p.kv_heads - 1) / p.kv_heads : 1;
  int64_t blocks = (rows + PANEL - 1) / PANEL;
  if (blocks > wanted) blocks = std::max(wanted, (rows + most - 1) / most);
  if (blocks < wanted)
    while (blocks * p.kv_heads % threads) ++blocks;
  const int64_t size = padded((rows + blocks - 1) / blocks, LANES);
  blocks = (rows + size - 1) / size;
  std::vector<Buffers> buffers(threads);
  for (Buffers& own : buffers) {
    own.queries.resize(lines(padded(size, PANEL) * in_cells<Cell>(p.key_dim)));
    own.outputs.resize(lines(padded(size, PANEL) * value_width));
    own.keys.resize(lines(TILE * in_cells<Cell>(p.key_dim)));
    own.values.resize(lines(in_cells<Cell>(TILE) * value_width));
    own.scores.resize(lines(TILE * PANEL));
    own.panels.resize(padded(size, PANEL) / PANEL);
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t item = 0; item < blocks * p.kv_heads; ++item) {
    // The last rows see the most keys.
    const int64_t block = blocks - 1 - item / p.kv_heads, head = item % p.kv_heads;
    attend<T, Cell>(p, q, runs, head, block * size, std::min(rows, (block + 1) * size), buffers[omp_get_thread_num()],
                    out, lse);
  }
}

}  // namespace many

}  // namespace
