// Few rows times weights in blocks on processors that multiply bytes. Numbers of a row become integers of 24 bits, alike
// scaled for 32 of them, in three bytes: sums of their products with levels are exact, and times a scale as exact as
// those of float32.

#pragma once

#include <algorithm>

#include "blocks.h"

namespace {

// Rows of such a weight that are read side by side.
constexpr int64_t EIGHT = 8;

// Numbers of a row, 32 of them, as integers times a scale: what is not finite makes the scale none.
struct Fixed {
  static constexpr int COUNT = 32;
  static constexpr float MOST = 127 << 16, LEAST = 1e-30f;

  // By sixteen numbers, the first byte of each, which counts most, then the second and the third.
  int8_t bytes[2][3][16];
  float scale, sum, halves[2];
};

#ifdef __AVX512VNNI__

inline bool multiplies_bytes() {
  static const bool found = __builtin_cpu_supports("avx512vnni");
  return found;
}

inline void to_fixed(const float* from, Fixed& to) {
  const Floats halves[] = {load(from), load(from + LANES)};
  const auto size = [](Floats x) { return (Floats)((Words)x & 0x7fffffff); };
  const float most = _mm512_reduce_max_ps((__m512)larger(size(halves[0]), size(halves[1])));
  // Sums find what is not a number, which the largest one may not.
  const float all_of_them = _mm512_reduce_add_ps((__m512)(halves[0] * 0.0f + halves[1] * 0.0f));
  to.scale = most < Fixed::LEAST ? 0.0f : most / Fixed::MOST + all_of_them;
  const Floats factor = all(most < Fixed::LEAST || all_of_them != 0 ? 0.0f : Fixed::MOST / most);
  for (int half = 0; half < 2; ++half) {
    Ints left = (Ints)_mm512_cvtps_epi32((__m512)(all_of_them != 0 ? Floats{} : halves[half] * factor));
    to.halves[half] = _mm512_reduce_add_epi32((__m512i)left) * to.scale;
    for (int byte = 2; byte >= 0; --byte) {
      const Ints own = (Ints)((Words)left << 24) >> 24;
      _mm_storeu_si128((__m128i*)to.bytes[half][byte], _mm512_cvtepi32_epi8((__m512i)own));
      left = (left - own) >> 8;
    }
  }
  to.sum = to.halves[0] + to.halves[1];
}

// Blocks of four rows.
struct FourRows {
  const uint8_t* const* rows;
  int64_t at;

  template <class Number> Number number(int row, int offset) const {
    Number found;
    std::memcpy(&found, rows[row] + at + offset, sizeof found);
    return found;
  }

  // Sixteen bytes of each.
  __m512i bytes(int offset) const {
    const auto own = [&](int row) { return _mm_loadu_si128((const __m128i*)(rows[row] + at + offset)); };
    __m512i found = _mm512_castsi128_si512(own(0));
    found = _mm512_inserti32x4(found, own(1), 1);
    found = _mm512_inserti32x4(found, own(2), 2);
    return _mm512_inserti32x4(found, own(3), 3);
  }

  // Four bits of each of sixteen bytes.
  __m512i four_bits(int offset, bool upper) const {
    const __m512i found = bytes(offset);
    return _mm512_and_si512(upper ? _mm512_srli_epi16(found, 4) : found, _mm512_set1_epi8(15));
  }

  // Two float16 numbers of each.
  void halves(int offset, Four* first, Four* second) const {
    const auto own = [&](int row) { return number<int32_t>(row, offset); };
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m256 found = _mm256_cvtph_ps(_mm_shuffle_epi8(_mm_setr_epi32(own(0), own(1), own(2), own(3)), order));
    *first = (Four)_mm256_castps256_ps128(found);
    *second = (Four)_mm256_extractf128_ps(found, 1);
  }
};

// to[i] = the i-th of sixteen numbers of every row, times the row's factors.
inline void across(const __m512i (&numbers)[4], const __m512 (&factors)[4], Four to[16]) {
  __m512 rows[4];
  for (int i = 0; i < 4; ++i) rows[i] = _mm512_mul_ps(_mm512_cvtepi32_ps(numbers[i]), factors[i]);
  const __m512 first[] = {_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1])};
  const __m512 last[] = {_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3])};
  for (int i = 0; i < 4; ++i) {
    const __m512d low = _mm512_castps_pd(first[i / 2]), high = _mm512_castps_pd(last[i / 2]);
    Four found[4];
    _mm512_storeu_pd(found, i % 2 ? _mm512_unpackhi_pd(low, high) : _mm512_unpacklo_pd(low, high));
    for (int j = 0; j < 4; ++j) to[4 * j + i] = found[j];
  }
}

// What each kind has: a scale and an offset for each EACH elements of four blocks; and levels from 0 on, a byte each, of
// sixteen elements of each block from `e` on of a unit.

template <int ZERO, bool FIFTH> inline void factors(Small<ZERO, FIFTH>, const FourRows& blocks, Four* scale, Four* low) {
  blocks.halves(0, scale, low);
  if (ZERO) *low = *scale * (float)-ZERO;
}

template <int ZERO, bool FIFTH> inline __m512i levels(Small<ZERO, FIFTH> like, const FourRows& blocks, int, int e) {
  const __m512i found = blocks.four_bits(like.LEVELS, e >= 16);
  if (!FIFTH) return found;
  __mmask64 fifth = 0;
  for (int row = 0; row < 4; ++row) fifth |= (__mmask64)blocks.number<uint16_t>(row, like.HEAD + e / 8) << 16 * row;
  return _mm512_mask_blend_epi8(fifth, found, _mm512_or_si512(found, _mm512_set1_epi8(16)));
}

inline void factors(Eight, const FourRows& blocks, Four* scale, Four* low) {
  Four levels;
  blocks.halves(0, scale, &levels);
  *low = *scale * -128.0f;
}

inline __m512i levels(Eight, const FourRows& blocks, int, int e) {
  return _mm512_xor_si512(blocks.bytes(2 + e), _mm512_set1_epi8(-128));
}

template <bool FIFTH> inline void factors(Large<FIFTH>, const FourRows& blocks, Four* scale, Four* low) {
  // Behind two halves: the lower four scales, the upper ones, whose bits lie apart, and so the offsets.
  const __m512i given = blocks.bytes(0);
  constexpr int SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, UPPER = 0x30303030;
  const auto each = [](int a, int b, int c, int d) { return _mm512_broadcast_i32x4(_mm_setr_epi32(a, b, c, d)); };
  const __m512i own = _mm512_srlv_epi32(_mm512_shuffle_epi32(given, (_MM_PERM_ENUM)0b11'10'11'01), each(0, 0, 0, 4));
  const __m512i beside = _mm512_srli_epi32(_mm512_shuffle_epi32(given, (_MM_PERM_ENUM)0b10'10'01'01), 2);
  const __m512i bytes = _mm512_or_si512(_mm512_and_si512(own, each(SIX, FOUR, SIX, FOUR)),
                                        _mm512_and_si512(beside, each(0, UPPER, 0, UPPER)));
  Four first, second, found[16];
  blocks.halves(0, &first, &second);
  __m512i numbers[4];
  __m512 both[4];
  for (int i = 0; i < 4; ++i) {
    both[i] = _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(first[i]), _mm512_set1_ps(-second[i]));
    __m128i rows[4];
    _mm512_storeu_si512(rows, bytes);
    numbers[i] = _mm512_cvtepu8_epi32(rows[i]);
  }
  across(numbers, both, found);
  std::copy(found, found + 8, scale);
  std::copy(found + 8, found + 16, low);
}

template <bool FIFTH> inline __m512i levels(Large<FIFTH> like, const FourRows& blocks, int unit, int e) {
  const __m512i found = blocks.four_bits(like.LEVELS + unit / 2 + e % 32, e >= 32);
  if (!FIFTH) return found;
  const __mmask64 fifth = _mm512_test_epi8_mask(blocks.bytes(like.HIGH + e % 32), _mm512_set1_epi8(1 << (unit + e) / 32));
  return _mm512_mask_blend_epi8(fifth, found, _mm512_or_si512(found, _mm512_set1_epi8(16)));
}

inline void factors(Six, const FourRows& blocks, Four* scale, Four* low) {
  __m512i numbers[4];
  __m512 both[4];
  Four first, second;
  blocks.halves(206, &first, &second);
  for (int i = 0; i < 4; ++i) {
    numbers[i] = _mm512_cvtepi8_epi32(blocks.number<__m128i>(i, 192));
    both[i] = _mm512_set1_ps(second[i]);
  }
  across(numbers, both, scale);
  for (int i = 0; i < 16; ++i) low[i] = scale[i] * -32.0f;
}

inline __m512i levels(Six, const FourRows& blocks, int unit, int e) {
  const __m512i found = blocks.four_bits(unit / 2 + e % 64, e >= 64), high = blocks.bytes(128 + unit / 4 + e % 32);
  const int shift = e / 32 * 2;
  const __m512i upper = shift < 4 ? _mm512_slli_epi16(high, 4 - shift) : _mm512_srli_epi16(high, shift - 4);
  return _mm512_or_si512(found, _mm512_and_si512(upper, _mm512_set1_epi8(0x30)));
}

// total[2 * r + i / 4][i % 4] = x[r] . weight[i] for R rows of x, `x_step` parts apart, and eight of the weight in blocks,
// with so many columns. Meanwhile fetches what lies `ahead` bytes further on, if anything does.
template <int R, class K>
__attribute__((noinline)) void multiply_bytes(const Fixed* x, int64_t x_step, const uint8_t* const rows[EIGHT],
                                              int64_t columns, int64_t ahead, Four total[2 * R]) {
  constexpr int PARTS = K::ELEMENTS / K::EACH, GROUPS = K::EACH / 16;
  const __m512i lanes = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  __m512 sum[R][2];
  Four lows[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < 2 * R; ++r) sum[r / 2][r % 2] = _mm512_setzero_ps(), lows[r / 2][r % 2] = Four{};
  int64_t fetched = 0;
  FourRows blocks[] = {{rows, 0}, {rows + 4, 0}};
  for (int64_t d = 0; d < columns; d += K::ELEMENTS) {
    for (; ahead && fetched < blocks[0].at + K::BYTES; fetched += LINE_BYTES)
      for (int i = 0; i < EIGHT; ++i) fetch(rows[i] + ahead + fetched, 1);
    Four scale[2][PARTS], low[2][PARTS];
    for (int set = 0; set < 2; ++set) factors(K{}, blocks[set], scale[set], low[set]);
#pragma GCC unroll 16
    for (int part = 0; part < PARTS; ++part) {
      const int element = part * K::EACH, unit = element / K::UNIT * K::UNIT;
      __m512i own[2][GROUPS];
      __m512 factor[2];
#pragma GCC unroll 2
      for (int set = 0; set < 2; ++set) {
#pragma GCC unroll 2
        for (int i = 0; i < GROUPS; ++i) own[set][i] = levels(K{}, blocks[set], unit, element - unit + 16 * i);
        factor[set] = _mm512_permutevar_ps(_mm512_broadcast_f32x4((__m128)scale[set][part]), lanes);
      }
      const Fixed* const first = x + (d + element) / Fixed::COUNT;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Fixed& fixed = first[r * x_step];
        const int half = element % Fixed::COUNT / 16;
        __m512i found[2] = {}, least[2] = {};
#pragma GCC unroll 3
        for (int byte = 0; byte < 3; ++byte) {
          // Eight more bits of sums with levels of so many are too much for an integer.
          __m512i(&to)[2] = K::BITS == 8 && byte == 2 ? least : found;
#pragma GCC unroll 2
          for (int set = 0; set < 2; ++set)
            if (byte && &to == &found) to[set] = _mm512_slli_epi32(to[set], 8);
#pragma GCC unroll 2
          for (int i = 0; i < GROUPS; ++i) {
            const __m512i bytes =
                _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)fixed.bytes[half + i][byte]));
#pragma GCC unroll 2
            for (int set = 0; set < 2; ++set) to[set] = _mm512_dpbusd_epi32(to[set], own[set][i], bytes);
          }
        }
#pragma GCC unroll 2
        for (int set = 0; set < 2; ++set) {
          __m512 whole = _mm512_cvtepi32_ps(found[set]);
          if (K::BITS == 8) whole = _mm512_fmadd_ps(whole, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(least[set]));
          sum[r][set] = _mm512_fmadd_ps(whole, _mm512_mul_ps(factor[set], _mm512_set1_ps(fixed.scale)), sum[r][set]);
          lows[r][set] += low[set][part] * (GROUPS == 2 ? fixed.sum : fixed.halves[half]);
        }
      }
    }
    for (FourRows& own : blocks) own.at += K::BYTES;
  }
  const __m512i firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int set = 0; set < 2; ++set) {
      __m512 own = _mm512_add_ps(sum[r][set], _mm512_permute_ps(sum[r][set], 0b01'00'11'10));
      own = _mm512_add_ps(own, _mm512_permute_ps(own, 0b10'11'00'01));
      total[2 * r + set] = lows[r][set] + (Four)_mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, own));
    }
}

#else

inline bool multiplies_bytes() { return false; }
inline void to_fixed(const float*, Fixed&) {}

#endif

}  // namespace
