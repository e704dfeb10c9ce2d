// Products of small matrices that lie in the first cache, summed up in float32.

#pragma once

#include <algorithm>
#include <type_traits>

#include "cells.h"
#include "vectors.h"

namespace {

// Rows and vectors of columns of a product that are in registers at a time.
#if LANES == 16
constexpr int ROWS = 6, COLUMNS = 4;
#else
constexpr int ROWS = 6, COLUMNS = 2;
#endif
constexpr int TWICE_ROWS = 2 * ROWS, SUMS = ROWS * COLUMNS;

// What becomes of numbers that are there already: sums begin with them, or with a part of each; or are added to them.
enum class Before { KEPT, SCALED, ADDED };

struct Nothing {
  void operator()(int) const {}
};

// to[r][c] = what is kept of to[r][c], keep[r] times it where it is scaled, + sum over i of
// a[r * a_row + i * a_next] * b[i * b_step + c] for R rows and C vectors; a product of two cells is that of their numbers,
// summed up. What is done beside(i) meanwhile should be little.
template <int R, int C, Before BEFORE, class Cell, class Beside = Nothing>
inline void product(const Cell* a, int a_row, int a_next, const Cell* b, int b_step, int count, float* to,
                    int to_step, const float* keep, bool fresh, Beside beside = {}) {
  // Unrolled, so that the sums are in registers from beginning to end.
  Floats sum[R][C];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c)
      sum[r][c] = fresh || BEFORE == Before::ADDED ? Floats{} : load(to + r * to_step + c * LANES);
  if (BEFORE == Before::SCALED)
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] *= keep[r];
  for (int i = 0; i < count; ++i) {
    beside(i);
    decltype(load(b)) value[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) value[c] = load(b + (int64_t)i * b_step + c * LANES);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Cell factor = a[r * a_row + i * a_next];
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sum[r][c] = add_product(sum[r][c], factor, value[c]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) {
      float* const at = to + r * to_step + c * LANES;
      store(at, fresh || BEFORE != Before::ADDED ? sum[r][c] : load(at) + sum[r][c]);
    }
}

template <int C, Before BEFORE, class Cell>
inline void product_rows(int rows, const Cell* a, int a_row, int a_next, const Cell* b, int b_step, int count,
                         float* to, int to_step, const float* keep, bool fresh) {
  int r = 0;
  // A sum waits for the one before: few columns need more rows to keep the processor busy.
  for (; C * TWICE_ROWS <= SUMS && r + TWICE_ROWS <= rows; r += TWICE_ROWS)
    product<C * TWICE_ROWS <= SUMS ? TWICE_ROWS : 1, C, BEFORE>(a + r * a_row, a_row, a_next, b, b_step, count,
                                                                to + r * to_step, to_step, keep + r, fresh);
  for (; r + ROWS <= rows; r += ROWS)
    product<ROWS, C, BEFORE>(a + r * a_row, a_row, a_next, b, b_step, count, to + r * to_step, to_step, keep + r,
                             fresh);
  if (r + 4 <= rows) {
    product<4, C, BEFORE>(a + r * a_row, a_row, a_next, b, b_step, count, to + r * to_step, to_step, keep + r, fresh);
    r += 4;
  }
  for (; r < rows; ++r)
    product<1, C, BEFORE>(a + r * a_row, a_row, a_next, b, b_step, count, to + r * to_step, to_step, keep + r, fresh);
}

// The same for any number of vectors of columns.
template <Before BEFORE, class Cell>
inline void multiply(int rows, int vectors, const Cell* a, int a_row, int a_next, const Cell* b, int b_step,
                     int count, float* to, int to_step, const float* keep, bool fresh) {
  for (int left = vectors; left;) {
    const int parts = (left + COLUMNS - 1) / COLUMNS, now = (left + parts - 1) / parts;
    const int first = (vectors - left) * LANES;
    const auto call = [&](auto columns) {
      product_rows<decltype(columns)::value, BEFORE>(rows, a, a_row, a_next, b + first, b_step, count, to + first,
                                                     to_step, keep, fresh);
    };
    if (now == 1) call(std::integral_constant<int, 1>{});
    if (now == 2) call(std::integral_constant<int, 2>{});
    if (now == 3) call(std::integral_constant<int, std::min(3, COLUMNS)>{});
    if (now == 4) call(std::integral_constant<int, COLUMNS>{});
    left -= now;
  }
}

}  // namespace
