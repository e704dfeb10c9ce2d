// What tiles of keys, queries, weights and values are made of, for products: cells of 4 bytes, each a number of float32
// or, where the processor multiplies such, two of bfloat16 that follow one another along what is summed up.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "vectors.h"

namespace {

// sum + a * b, in every lane.
inline Floats add_product(Floats sum, float a, Floats b) { return sum + a * b; }

inline Floats add_product(Floats sum, Floats a, Floats b) { return sum + a * b; }

// A vector of cells of numbers that follow one another; the first of them, and zeros for the others.
template <class T> inline Floats cells_of(const T* from, float) { return load(from); }
template <class T> inline Floats cells_of(const T* from, int64_t count, float) { return load(from, count); }

template <class T> inline void pack(const T* from, int dim, float* to, int width) {
  int d = 0;
  for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d));
  for (; d < dim; ++d) to[d] = scalar(from + d);
  for (; d < width; ++d) to[d] = 0;
}

// Cells of rows of `dim` values, from one row of cells to the next `width`: along columns.
template <class T> inline void pack_columns(const T* const* from, int rows, int dim, float* to, int width) {
  for (int r = 0; r < rows; ++r) pack(from[r], dim, to + r * width, width);
}

// Weights of two keys that follow one another, `step` cells apart where each has a cell of its own.
inline void store_weights(float* to, int step, Floats first, Floats second) {
  store(to, first);
  store(to + step, second);
}

#ifdef __AVX512BF16__
struct Pair { BFloat16 low, high; };

inline Words load(const Pair* from) {
  Words bits;
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

inline void store(Pair* to, Words bits) { std::memcpy(to, &bits, sizeof bits); }

inline Floats add_product(Floats sum, Pair a, Words b) {
  int32_t bits;
  std::memcpy(&bits, &a, sizeof bits);
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)b);
}

inline Floats add_product(Floats sum, Words a, Words b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

inline Words cells_of(const BFloat16* from, Pair) { return load((const Pair*)from); }
inline Words cells_of(const BFloat16* from, int64_t count, Pair) {
  Words bits{};
  std::memcpy(&bits, from, count * sizeof *from);
  return bits;
}

inline void pack(const BFloat16* from, int dim, Pair* to, int width) {
  std::memcpy(to, from, dim * sizeof *from);
  std::memset((BFloat16*)to + dim, 0, (2 * width - dim) * sizeof *from);
}

inline void pack_columns(const BFloat16* const* from, int rows, int dim, Pair* to, int width) {
  static constexpr BFloat16 none[LANES] = {};
  for (int r = 0; r < rows; r += 2, to += width) {
    const BFloat16 *const low = from[r], *const high = from[r + 1 < rows ? r + 1 : r];
    int d = 0;
    for (; d + LANES <= dim; d += LANES)
      store(to + d, widened(&low[d].bits) | widened(r + 1 < rows ? &high[d].bits : &none->bits) << 16);
    for (; d < dim; ++d) to[d] = {low[d], r + 1 < rows ? high[d] : BFloat16{}};
    for (; d < width; ++d) to[d] = {};
  }
}

// Rounded to the nearest number, or the even one of two.
inline void store_weights(Pair* to, int, Floats first, Floats second) {
  typedef uint16_t Numbers __attribute__((vector_size(4 * LANES)));
  constexpr Numbers order = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const auto rounded = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  store(to, (Words)_mm512_permutexvar_epi16((__m512i)order, (__m512i)rounded));
}
#endif

#ifdef __AVX512BF16__
constexpr bool HAS_PAIRS = true;
#else
constexpr bool HAS_PAIRS = false;
#endif

// Calls with a cell that numbers of a type are multiplied in: by pairs, where that is asked for and possible.
template <class T, class Call> inline void with_cell([[maybe_unused]] bool pairs, Call call) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<T, BFloat16>)
    if (pairs) return call(Pair{});
#endif
  call(float{});
}

// Numbers in a cell.
template <class Cell> constexpr int NUMBERS = std::is_same_v<Cell, float> ? 1 : 2;

template <class Cell> inline int in_cells(int64_t numbers) {
  return (int)((numbers + NUMBERS<Cell> - 1) / NUMBERS<Cell>);
}

}  // namespace
