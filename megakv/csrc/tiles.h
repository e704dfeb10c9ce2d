// Rows of a weight as cells of a product whose lanes are outputs.

#pragma once

#include "blocks.h"
#include "cells.h"
#include "products.h"

namespace {

// Outputs, and cells of each, that are made at a time.
constexpr int64_t TILE_OUTPUTS = 2 * LANES;
constexpr int64_t PIECE = 128;

// What is in a word of each of LANES rows, and a number of the column `d`.
inline void store_words(Words words, float* to, float) { store(to, (Floats)words); }
template <class T> inline void store_words(Words words, float* to, T like) {
  for (int i = 0; i < 2; ++i) store(to + i * TILE_OUTPUTS, number(words, i, like));
}
template <class T> inline void store_number(const T* from, int64_t d, float* to) { to[d * TILE_OUTPUTS] = scalar(from); }
#ifdef __AVX512BF16__
inline void store_words(Words words, Pair* to, BFloat16) { store(to, words); }
inline void store_number(const BFloat16* from, int64_t d, Pair* to) {
  Pair& pair = to[d / 2 * TILE_OUTPUTS];
  // Behind the last number of a row comes none.
  if (d % 2)
    pair.high = *from;
  else
    pair = {*from, {}};
}
#endif

// Cells [columns, TILE_OUTPUTS] of so many rows, `step` bytes apart, from the column `d` on.
template <class T, class Cell>
void pack_rows(Plain<T>, const uint8_t* first, int64_t step, int64_t rows, int64_t d, int64_t columns, Cell* to) {
  constexpr int64_t EACH = 4 * sizeof(float) / sizeof(T);
  const int64_t whole = columns / EACH * EACH;
  const uint8_t* const from = first + d * sizeof(T);
  int64_t row = 0;
  for (; row + LANES <= rows; row += LANES)
    for (int64_t c = 0; c < whole; c += EACH) {
      Words words[4];
      across((const char*)from + row * step + c * sizeof(T), step, words);
      for (int i = 0; i < 4; ++i) store_words(words[i], to + (c + i * EACH / 4) / NUMBERS<Cell> * TILE_OUTPUTS + row, T{});
    }
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t c = i < row ? whole : 0; c < columns; ++c) store_number((const T*)(from + i * step) + c, c, to + i);
}

// The same of rows in blocks, which are unpacked first: rounded where cells are pairs.
template <class K, class Cell>
__attribute__((noinline)) void pack_rows(K, const uint8_t* first, int64_t step, int64_t rows, int64_t d, int64_t columns,
                                         Cell* to) {
  typedef std::conditional_t<NUMBERS<Cell> == 1, float, BFloat16> Number;
  static_assert(PIECE * NUMBERS<Cell> % (STRETCH / 2) == 0);
  Number tile[TILE_OUTPUTS][PIECE * NUMBERS<Cell>];
  for (int64_t row = 0; row < rows; ++row) unpack<K>(first + row * step, d, d + columns, tile[row]);
  pack_rows(Plain<Number>{}, (const uint8_t*)tile, sizeof *tile, rows, 0, columns, to);
}

}  // namespace
