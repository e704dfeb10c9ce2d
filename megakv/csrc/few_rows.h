// Few rows times weights, for processors: each weight is read once, in its type, as fast as memory gives it.
//
// Decoding multiplies a row or a few by every weight of a model: as in attention of a few query rows, reading is the work.
// Of more rows the lanes are outputs, and weights are made cells once, in the first cache; bfloat16 that is multiplied by
// pairs is in cells as it lies there.

#pragma once

#include <algorithm>
#include <omp.h>

#include "bytes.h"
#include "cells.h"
#include "products.h"
#include "rounding.h"
#include "tiles.h"
#include "vectors.h"

namespace {

// Rows of the weight that are read side by side.
constexpr int64_t SIDE = 4;
// Rows of x whose products with them are in registers at a time.
constexpr int64_t MOST_ROWS = LANES == 16 ? 6 : 4;
// Rows beyond which lanes are outputs, in float32, and in pairs or where weights are in blocks; and up to the first, inputs
// are never rounded to pairs.
constexpr int64_t FEW = 6, FEW_MORE = 16;
// Rows of x whose products with two vectors of outputs are in registers at a time.
constexpr int SIDE_BY_SIDE = SUMS / 2;
// Rows, about, that meet all columns of a tile before others do, and cells of each that are made at a time: with them,
// what a thread reads again and again stays in the second cache.
constexpr int64_t ROWS_BLOCK = 96;
constexpr int64_t BLOCK_CELLS = 8 * PIECE;
// Tiles that a block of rows meets while it lies there.
constexpr int64_t GROUP = 4;
// Rows that take as long as making cells of the weights that they meet.
constexpr int64_t PACKING_ROWS = 13;
// Columns whose products are summed up in one running sum: more would cost digits.
constexpr int64_t RUN = 128 * LANES;
// Multiplications that are not worth a second thread.
constexpr int64_t LEAST_WORK = 1 << 16;

// total[r][i] = x[r] . weight[i] for R rows of x, `x_step` cells apart, and four of the weight, with so many columns; those
// of x go on with zeros up to a multiple of a vector's. Meanwhile fetches what lies `ahead` bytes further on, if anything
// does.
template <int R, class T, class Cell>
void multiply_plain(const Cell* x, int64_t x_step, const uint8_t* const rows[SIDE], int64_t columns, int64_t ahead,
                    Four total[R]) {
  constexpr int64_t EACH = LANES * NUMBERS<Cell>;
  const T* weight[SIDE];
  for (int i = 0; i < SIDE; ++i) weight[i] = (const T*)rows[i];
  const int64_t whole = columns / EACH * EACH;
  for (int r = 0; r < R; ++r) total[r] = Four{};
  for (int64_t first = 0; first < columns; first += RUN) {
    const int64_t last = std::min(first + RUN, whole);
    Floats sum[R][SIDE] = {};
    // Sums are in registers only where this is part of the loop.
    const auto add = [&](int64_t d, auto cells) __attribute__((always_inline)) {
      decltype(cells(weight[0])) each[SIDE];
      for (int i = 0; i < SIDE; ++i) each[i] = cells(weight[i] + d);
      for (int r = 0; r < R; ++r) {
        const auto own = load(x + r * x_step + d / NUMBERS<Cell>);
        for (int i = 0; i < SIDE; ++i) sum[r][i] = add_product(sum[r][i], own, each[i]);
      }
    };
    for (int64_t d = first; d < last; d += EACH) {
      if (ahead && d * sizeof(T) % LINE_BYTES == 0)
        for (int i = 0; i < SIDE; ++i) fetch(rows[i] + ahead + d * sizeof(T), 1);
      add(d, [](const T* from) { return cells_of(from, Cell{}); });
    }
    if (first + RUN >= columns && whole < columns)
      add(whole, [&](const T* from) { return cells_of(from, columns - whole, Cell{}); });
    for (int r = 0; r < R; ++r) total[r] += sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
  }
}

// The same of rows in blocks, each of which is unpacked once for all rows of x. One for all types of results.
template <int R, class K>
__attribute__((noinline)) void multiply_blocks(const float* x, int64_t x_step, const uint8_t* const rows[SIDE],
                                               int64_t columns, int64_t ahead, Four total[R]) {
  static_assert(RUN % STRETCH == 0);
  float scale[SIDE][RUN / K::EACH + LANES], low[SIDE][RUN / K::EACH + LANES];
  for (int r = 0; r < R; ++r) total[r] = Four{};
  for (int64_t first = 0; first < columns; first += RUN) {
    const int64_t last = std::min(first + RUN, columns);
    int64_t at = bytes_of(K{}, first), fetched = at;
    for (int i = 0; i < SIDE; ++i) K::scales(rows[i] + at, (int)((last - first) / K::ELEMENTS), scale[i], low[i]);
    Floats sum[R][SIDE] = {};
    const auto add = [&](int i, int64_t d, const uint8_t* block, int unit) __attribute__((always_inline)) {
      const int64_t part = (d - first) / K::EACH;
      each_weights<K>(block, unit, scale[i] + part, low[i] + part, [&](int e, Floats weights) __attribute__((always_inline)) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r][i] += load(x + r * x_step + d + unit + e) * weights;
      });
    };
    for (int64_t d = first; d < last; d += K::ELEMENTS, at += K::BYTES) {
      for (; ahead && fetched < at + K::BYTES; fetched += LINE_BYTES)
        for (int i = 0; i < SIDE; ++i) fetch(rows[i] + ahead + fetched, 1);
      for (int unit = 0; unit < K::ELEMENTS; unit += K::UNIT)
#pragma GCC unroll 4
        for (int i = 0; i < SIDE; ++i) add(i, d, rows[i] + at, unit);
    }
    for (int r = 0; r < R; ++r) total[r] += sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
  }
}

// Rows of a weight, `step` bytes apart, each of so many columns, and a bias where there is one; plain, or in blocks of a
// kind (see `with_kind`).
struct Linear {
  const void* weight;
  int64_t step, outputs, columns;
  const void* bias;
  int64_t biases, kind;

  // Whether it is for inputs of so many columns of a type.
  template <class T> void check(int64_t inputs, T) const {
    require(outputs >= 0 && columns == inputs && (!bias || biases == outputs), Fault::WEIGHTS);
    const bool known = with_kind<T>(kind, [&](auto own) {
      const int64_t row = bytes_of(own, columns);
      require(whole_blocks(own, columns) && (outputs < 2 || step >= row), Fault::WEIGHTS);
    });
    require(known, Fault::WEIGHTS);
  }
};

// Calls compute(first, last, memory) with the blocks of every thread, and memory for so many floats.
template <class Compute> void divide(int64_t blocks, int64_t work, int threads, int64_t scratch, Compute compute) {
  const int64_t workers = work < LEAST_WORK ? 1 : std::min<int64_t>(threads, blocks);
  // Nothing may be thrown where several threads are.
  Space<float> memory(std::max<int64_t>(workers, 1) * scratch);
  if (workers <= 1) return compute((int64_t)0, blocks, memory.data());
#pragma omp parallel for num_threads(workers) schedule(static, 1)
  for (int64_t own = 0; own < workers; ++own)
    compute(blocks * own / workers, blocks * (own + 1) / workers, memory.data() + own * scratch);
}

// Some of the rows.
struct Span {
  int64_t begin, end;
  int64_t count() const { return end - begin; }
};

// The same with parts of the rows, too, where threads are then better divided: compute(first, last, rows, memory).
template <class Compute>
void divide_both(int64_t blocks, int64_t rows, bool many, int64_t work, int threads, int64_t scratch, Compute compute) {
  int64_t parts = 1, least = 0;
  for (int64_t tried = 1; many && tried <= threads && work >= LEAST_WORK; ++tried) {
    const int64_t across = std::min<int64_t>(std::max<int64_t>(threads / tried, 1), blocks);
    const int64_t tiles = (blocks + across - 1) / std::max<int64_t>(across, 1);
    const int64_t cost = ((rows + tried - 1) / tried + PACKING_ROWS) * tiles;
    if (!least || cost < least) parts = tried, least = cost;
  }
  const int64_t across = std::min<int64_t>(std::max<int64_t>(threads / parts, 1), std::max<int64_t>(blocks, 1));
  divide(parts * across, work, threads, scratch, [&](int64_t first, int64_t last, float* memory) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t part = item / across, own = item % across;
      compute(blocks * own / across, blocks * (own + 1) / across,
              Span{rows * part / parts, rows * (part + 1) / parts}, memory);
    }
  });
}

// Whether many rows of bfloat16 are multiplied by pairs, and whether some weights are in blocks.
struct Way {
  bool pairs, blocks;
};

// Inputs in float32, [rows, columns]: rows go on with zeros up to a multiple of two vectors. Where bfloat16 is multiplied by
// `pairs`, the cells of more than a few rows are such.
struct Inputs {
  int64_t rows, columns, step;
  bool pairs, blocks;
  Space<float> wide;
  Space<uint32_t> narrow;
  Space<Fixed> fixed;
  const float* from;

  // Of rows that are written later, or lie somewhere as they are multiplied, so many elements apart.
  Inputs(int64_t rows, int64_t columns, Way way, const float* lent = nullptr, int64_t lent_step = 0)
      : rows(rows), columns(columns), step(lent ? lent_step : (columns + 2 * LANES - 1) / (2 * LANES) * 2 * LANES),
        pairs(HAS_PAIRS && way.pairs && rows > FEW && !lent), blocks(way.blocks),
        wide(lent ? 0 : rows * step), narrow(pairs ? rows * step / 2 : 0),
        fixed(blocks && !many() && columns % Fixed::COUNT == 0 && multiplies_bytes() ? rows * parts() : 0),
        from(lent ? lent : wide.data()) {
    for (int64_t row = 0; row < rows && !lent; ++row) {
      std::fill(&wide[row * step] + columns, &wide[row * step] + step, 0.0f);
      if (pairs) std::fill_n(numbers(row) + columns, step - columns, BFloat16{});
    }
  }

  // Of rows that are contiguous, or so many elements apart.
  template <class T>
  Inputs(const T* x, int64_t rows, int64_t columns, Way way, int threads, int64_t x_step = 0)
      : Inputs(rows, columns, way, as_it_lies(x, columns), x_step ? x_step : columns) {
    if ((const void*)from == x) {
      fix();
      return;
    }
    if (!x_step) x_step = columns;
    each_row(threads, [&](int64_t row, float* own) {
      each_vector(0, columns, [&](int64_t d, int64_t count) { store(own + d, some(x + row * x_step + d, count)); });
    });
  }

  // Calls with the number of every row, and where it is to be written.
  template <class Call> void each_row(int threads, Call call) {
    divide(rows, rows * step, threads, 0, [&](int64_t first, int64_t last, float*) {
      for (int64_t row = first; row < last; ++row) {
        float* const own = &wide[row * step];
        call(row, own);
        if (pairs) keep(row, 0, step, own);
      }
    });
    fix();
  }

  // Rows that are there by now, as integers, if they are multiplied so.
  void fix() {
    for (int64_t i = 0; i < fixed.size(); ++i)
      to_fixed(from + i / parts() * step + i % parts() * Fixed::COUNT, fixed[i]);
  }

  // Parts of a row of integers.
  int64_t parts() const { return columns / Fixed::COUNT; }

  // Columns [first, last) of a row, whose first one is at `own`: of such as are multiplied by pairs.
  void keep(int64_t row, int64_t first, int64_t last, const float* own) {
    each_vector(first, last, [&](int64_t d, int64_t count) {
      store_rounded(numbers(row) + d, some(own + d - first, count), count);
    });
  }

  // Whether lanes are outputs.
  bool many() const { return rows > (pairs || blocks ? FEW_MORE : FEW); }

  const float* cells(int64_t row, int64_t column, float) const { return from + row * step + column; }
#ifdef __AVX512BF16__
  const Pair* cells(int64_t row, int64_t column, Pair) const { return (const Pair*)&narrow[(row * step + column) / 2]; }
#endif

 private:
  BFloat16* numbers(int64_t row) { return (BFloat16*)narrow.data() + row * step; }

  // Float32 needs no copy where vectors end with its rows.
  static const float* as_it_lies(const float* x, int64_t columns) { return columns % (2 * LANES) ? nullptr : x; }
  template <class T> static const float* as_it_lies(const T*, int64_t) { return nullptr; }
};

template <class T> class Product {
 public:
  // The product goes to out [rows, out_step], whose first column is the output `origin`.
  Product(const Inputs& x, const Linear& linear, T* out, int64_t out_step, int64_t origin = 0)
      : x(x), weight((const uint8_t*)linear.weight), bias((const T*)linear.bias), kind(linear.kind), step(linear.step),
        outputs(linear.outputs), out(out), out_step(out_step), origin(origin) {}

  // Outputs that are computed side by side.
  static int64_t block(const Inputs& x) { return x.many() ? TILE_OUTPUTS : SIDE; }
  static int64_t blocks(const Inputs& x, int64_t outputs) { return (outputs + block(x) - 1) / block(x); }

  // Floats that a thread needs for it.
  static int64_t scratch(const Inputs& x) {
    return x.many() ? GROUP * TILE_OUTPUTS * (std::min<int64_t>(x.columns, BLOCK_CELLS) + PIECE + x.rows) : 0;
  }

  // Those of some blocks and rows: of few rows all.
  void compute(int64_t first, int64_t last, Span rows, float* memory) const {
    const int64_t each = block(x), begin = first * each, end = std::min(last * each, outputs);
    with_cell<T>(x.pairs, [&](auto cell) {
      typedef decltype(cell) Cell;
      x.many() ? compute_many<Cell>(begin, end, rows, memory) : compute_few<Cell>(begin, end);
    });
  }

 private:
  const Inputs& x;
  const uint8_t* weight;
  const T* bias;
  int64_t kind, step, outputs;
  T* out;
  int64_t out_step, origin;

  template <class Cell> void compute_few(int64_t begin, int64_t end) const {
    const int64_t each = kind && x.fixed.size() ? EIGHT : SIDE;
    for (int64_t at = begin; at < end; at += each) {
      const uint8_t* side[EIGHT];
      // Beyond the last row that one is taken again.
      for (int64_t i = 0; i < each; ++i) side[i] = weight + std::min(at + i, end - 1) * step;
      int64_t ahead = at + 2 * each <= end ? each * step : 0;
      for (int64_t row = 0; row < x.rows; ahead = 0) {
        const int64_t left = x.rows - row, parts = (left + MOST_ROWS - 1) / MOST_ROWS;
        const int64_t now = (left + parts - 1) / parts;
        few<MOST_ROWS, Cell>(now, row, side, each, at, end, ahead);
        row += now;
      }
    }
  }

  // The products of so many rows, R at most.
  template <int R, class Cell>
  void few(int64_t rows, int64_t row, const uint8_t* const* side, int64_t each, int64_t at, int64_t end,
           int64_t ahead) const {
    if constexpr (R > 1)
      if (rows < R) return few<R - 1, Cell>(rows, row, side, each, at, end, ahead);
    Four total[R * EIGHT / 4];
    with_kind<T>(kind, [&](auto own) {
      typedef decltype(own) K;
      // Weights in blocks are not rounded to pairs where they need not be.
      if constexpr (std::is_same_v<K, Plain<T>>)
        return multiply_plain<R, T>(x.cells(row, 0, Cell{}), x.step / NUMBERS<Cell>, side, x.columns, ahead, total);
      else {
#ifdef __AVX512VNNI__
        if (each == EIGHT)
          return multiply_bytes<R, K>(&x.fixed[row * x.parts()], x.parts(), side, x.columns, ahead, total);
#endif
        return multiply_blocks<R, K>(x.cells(row, 0, float{}), x.step, side, x.columns, ahead, total);
      }
    });
    for (int r = 0; r < R; ++r)
      for (int64_t i = 0; i < std::min(each, end - at); ++i)
        out[(row + r) * out_step + at + i - origin] =
            rounded(total[r * each / 4 + i / 4][i % 4] + (bias ? scalar(bias + at + i) : 0.0f), T{});
  }

  template <class Cell> void compute_many(int64_t begin, int64_t end, Span rows, float* memory) const {
    constexpr int64_t COLUMNS = PIECE * NUMBERS<Cell>, BLOCK = BLOCK_CELLS * NUMBERS<Cell>;
    // Of few rows cells are needed once.
    const int64_t parts = (rows.count() + ROWS_BLOCK / 2) / ROWS_BLOCK;
    const bool again = parts > 1;
    const int64_t each = again ? ((rows.count() + parts - 1) / parts + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE * SIDE_BY_SIDE
                               : std::max<int64_t>(rows.count(), 1);
    const int64_t held = TILE_OUTPUTS * (again ? std::min<int64_t>(in_cells<Cell>(x.columns), BLOCK_CELLS) : PIECE);
    const int64_t group = again ? GROUP * TILE_OUTPUTS : TILE_OUTPUTS, total_step = rows.count() * TILE_OUTPUTS;
    float* const totals = memory + (again ? GROUP : 1) * held;
    for (int64_t from = begin; from < end; from += group) {
      const int64_t stop = std::min(from + group, end);
      if (!x.columns) std::fill_n(totals, (stop - from + TILE_OUTPUTS - 1) / TILE_OUTPUTS * total_step, 0.0f);
      for (int64_t first = 0; first < x.columns; first += BLOCK)
        for (int64_t row = rows.begin; row < rows.end; row += each)
          for (int64_t at = from, i = 0; at < stop; at += TILE_OUTPUTS, ++i)
            for (int64_t d = first; d < std::min(first + BLOCK, x.columns); d += COLUMNS) {
              const int64_t length = std::min(COLUMNS, std::min(first + BLOCK, x.columns) - d);
              const uint8_t* const weights = weight + at * step;
              Cell* const own = (Cell*)memory + i * held + (again ? (d - first) / NUMBERS<Cell> * TILE_OUTPUTS : 0);
              const bool fresh = row == rows.begin, next = fresh && at + 2 * TILE_OUTPUTS <= end;
              int64_t byte = 0, bytes = 0;
              with_kind<T>(kind, [&](auto like) {
                if (fresh) pack_rows(like, weights, step, std::min(TILE_OUTPUTS, end - at), d, length, own);
                byte = bytes_of(like, d), bytes = bytes_of(like, d + length) - byte;
              });
              multiply_block({row, std::min(row + each, rows.end)}, d, own, in_cells<Cell>(length),
                             totals + i * total_step + (row - rows.begin) * TILE_OUTPUTS,
                             next ? weights + TILE_OUTPUTS * step + byte : nullptr, bytes);
            }
      for (int64_t at = from, i = 0; at < stop; at += TILE_OUTPUTS, ++i)
        for (int64_t row = rows.begin; row < rows.end; ++row)
          each_vector(0, std::min(TILE_OUTPUTS, end - at), [&](int64_t column, int64_t lanes) {
            Floats found = load(totals + i * total_step + (row - rows.begin) * TILE_OUTPUTS + column);
            if (bias) found += some(bias + at + column, lanes);
            store_rounded(out + row * out_step + at - origin + column, found, lanes);
          });
    }
  }

  // Products of a block of rows with a tile's cells from column `d` on, added to those of earlier columns. Meanwhile so
  // many bytes of each row of the next tile are fetched, if they are given.
  template <class Cell>
  void multiply_block(Span rows, int64_t d, const Cell* tile, int64_t cells, float* sums, const uint8_t* next,
                      int64_t bytes) const {
    // Lines are fetched with each product, as far as there are so many.
    const int64_t lines = std::max<int64_t>(std::min(cells / TILE_OUTPUTS, bytes / LINE_BYTES), 1);
    int64_t ahead = next ? 0 : bytes;
    for (int64_t row = rows.begin; row < rows.end; ahead += lines * LINE_BYTES) {
      const int64_t left = rows.end - row, parts = (left + SIDE_BY_SIDE - 1) / SIDE_BY_SIDE;
      const int64_t now = (left + parts - 1) / parts;
      multiply_rows<SIDE_BY_SIDE>(now, x.cells(row, d, Cell{}), tile, cells, sums + (row - rows.begin) * TILE_OUTPUTS,
                                  d == 0, ahead < bytes ? next + ahead : nullptr);
      row += now;
    }
    for (; ahead < bytes; ahead += LINE_BYTES)
      for (int64_t row = 0; row < TILE_OUTPUTS; ++row) fetch(next + row * step + ahead, 1);
  }

  // The products of so many rows, R at most; what lies `ahead`, a line of each output after the other, is fetched
  // meanwhile: as many as there are cells.
  template <int R, class Cell>
  void multiply_rows(int64_t rows, const Cell* own, const Cell* tile, int64_t cells, float* sums, bool fresh,
                     const uint8_t* ahead) const {
    const auto call = [&](auto beside) {
      product<R, 2, Before::ADDED>(own, x.step / NUMBERS<Cell>, 1, tile, TILE_OUTPUTS, cells, sums, TILE_OUTPUTS, nullptr,
                                 fresh, beside);
    };
    const auto bring = [&](int i) { fetch(ahead + i % TILE_OUTPUTS * step + i / TILE_OUTPUTS * LINE_BYTES, 1); };
    if (rows == R) return ahead ? call(bring) : call(Nothing{});
    if constexpr (R > 1) multiply_rows<R - 1>(rows, own, tile, cells, sums, fresh, ahead);
  }
};

// The products of one input with several weights of the type, side by side in out [rows, sum of their outputs].
template <class T> void products(const Inputs& x, const Linear* linears, int count, int threads, T* out) {
  int64_t blocks = 0, outputs = 0;
  for (int i = 0; i < count; ++i) {
    blocks += Product<T>::blocks(x, linears[i].outputs);
    outputs += linears[i].outputs;
  }
  divide_both(blocks, x.rows, x.many(), x.rows * x.columns * outputs, threads, Product<T>::scratch(x),
              [&](int64_t first, int64_t last, Span rows, float* memory) {
                T* to = out;
                for (int i = 0; i < count; ++i) {
                  const int64_t own = Product<T>::blocks(x, linears[i].outputs);
                  if (first < own && last > 0)
                    Product<T>(x, linears[i], to, outputs)
                        .compute(std::max<int64_t>(first, 0), std::min(last, own), rows, memory);
                  to += linears[i].outputs;
                  first -= own;
                  last -= own;
                }
              });
}

}  // namespace
