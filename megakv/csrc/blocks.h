// Weights in GGUF's blocks: see megakv/weights/blocks.py. Each becomes the float32 number that it unpacks to there, in
// registers: its level times a scale, which is exact, plus an offset, rounded once.

#pragma once

#include <algorithm>

#include "rounding.h"
#include "vectors.h"

namespace {

// Columns whose scales are unpacked at a time, at least: those of the largest block; and such blocks at most.
constexpr int STRETCH = 256, MOST = 8;

// LANES numbers in a byte each.
inline Words bytes(const uint8_t* from) {
#if LANES == 16
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  typedef uint8_t Bytes __attribute__((vector_size(LANES)));
  Bytes found;
  std::memcpy(&found, from, sizeof found);
  return __builtin_convertvector(found, Words);
#endif
}

inline Words signed_bytes(const uint8_t* from) {
#if LANES == 16
  return (Words)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return (Words)((Ints)(bytes(from) << 24) >> 24);
#endif
}

inline Words lane_numbers() {
  Words found;
  for (int lane = 0; lane < LANES; ++lane) found[lane] = lane;
  return found;
}

// The first two float16 numbers of so many blocks, to floats; behind them goes on what is none, up to a vector.
template <int BYTES> inline void halves(const uint8_t* from, int count, float* first, float* second) {
  for (int at = 0; at < count; at += LANES, from += LANES * BYTES) {
#if LANES == 16
    const __mmask16 some = count - at < LANES ? (1 << (count - at)) - 1 : -1;
    const __m512i places = (__m512i)(lane_numbers() * BYTES);
    const Words words = (Words)_mm512_mask_i32gather_epi32(places, some, places, from, 1);
#else
    Words words{};
    for (int i = 0; i < std::min(LANES, count - at); ++i) {
      uint32_t both;
      std::memcpy(&both, from + i * BYTES, sizeof both);
      words[i] = both;
    }
#endif
    store(first + at, number(words, 0, Float16{}));
    store(second + at, number(words, 1, Float16{}));
  }
}

// Four bits of the one, and those of the other from the fifth on.
inline Words below(Words four, Words others) { return ((four ^ others) & 15) ^ others; }

// What all kinds have: blocks of so many ELEMENTS and BYTES, a scale and an offset for EACH elements, which are in `scale`
// and `low` for so many blocks, and levels of LANES elements from `e` on of the UNIT that begins with `unit`: what lies
// above their BITS is rubbish.

// Blocks of 32: a scale; an offset, or levels from -ZERO on; and a fifth bit of every level, or none.
template <int ZERO, bool FIFTH> struct Small {
  static constexpr int ELEMENTS = 32, EACH = 32, UNIT = 32, HEAD = ZERO ? 2 : 4, LEVELS = HEAD + (FIFTH ? 4 : 0);
  static constexpr int BYTES = LEVELS + 16;
  static constexpr int BITS = FIFTH ? 5 : 4;

  static void scales(const uint8_t* from, int count, float* scale, float* low) {
    halves<BYTES>(from, count, scale, low);
    for (int i = 0; ZERO && i < count; ++i) low[i] = scale[i] * -ZERO;
  }

  static Words level(const uint8_t* block, int, int e) {
    const Words found = bytes(block + LEVELS + e % 16) >> (e < 16 ? 0 : 4);
    if (!FIFTH) return found;
    uint32_t bits;
    std::memcpy(&bits, block + HEAD, sizeof bits);
    return below(found, ((Words{} + bits) >> (lane_numbers() + e)) << 4);
  }
};

struct Eight {
  static constexpr int ELEMENTS = 32, EACH = 32, UNIT = 32, BYTES = 34;
  static constexpr int BITS = 8;

  static void scales(const uint8_t* from, int count, float* scale, float* low) {
    halves<BYTES>(from, count, scale, low);
    std::fill_n(low, count, 0.0f);
  }

  static Words level(const uint8_t* block, int, int e) { return signed_bytes(block + 2 + e); }
};

// Blocks of 256 with eight scales and offsets of six bits: the low halves of 32 bytes are levels, then the high ones.
template <bool FIFTH> struct Large {
  static constexpr int ELEMENTS = 256, EACH = 32, UNIT = 64, HIGH = 16, LEVELS = HIGH + (FIFTH ? 32 : 0);
  static constexpr int BYTES = LEVELS + 128;
  static constexpr int BITS = FIFTH ? 5 : 4;

  static void scales(const uint8_t* from, int count, float* scale, float* low) {
    float factors[2][MOST + LANES];
    halves<BYTES>(from, count, factors[0], factors[1]);
    for (int i = 0; i < count; ++i, from += BYTES, scale += 8, low += 8) {
      FourWords given;
      std::memcpy(&given, from + 4, sizeof given);
      // The lower four scales, the upper ones, whose bits lie apart, and so the offsets.
      const FourWords own = SHUFFLED(given, given, 0, 2, 1, 2) >> FourWords{0, 0, 0, 4};
      const FourWords beside = SHUFFLED(given, given, 0, 0, 1, 1) >> 2;
      constexpr uint32_t SIX = 0x3f3f3f3f, FOUR = 0x0f0f0f0f, UPPER = 0x30303030;
      const FourWords found = (own & FourWords{SIX, FOUR, SIX, FOUR}) | (beside & FourWords{0, UPPER, 0, UPPER});
      uint8_t numbers[16];
      std::memcpy(numbers, &found, sizeof numbers);
      float to[16];
      for (int j = 0; j < 16; j += LANES) {
        const Floats factor = (Ints)(lane_numbers() + j) < 8 ? all(factors[0][i]) : all(-factors[1][i]);
        store(to + j, __builtin_convertvector((Ints)bytes(numbers + j), Floats) * factor);
      }
      std::memcpy(scale, to, 8 * sizeof *to);
      std::memcpy(low, to + 8, 8 * sizeof *to);
    }
  }

  static Words level(const uint8_t* block, int unit, int e) {
    const Words found = bytes(block + LEVELS + unit / 2 + e % 32) >> (e < 32 ? 0 : 4);
    return FIFTH ? below(found, (bytes(block + HIGH + e % 32) << 4) >> (unit + e) / 32) : found;
  }
};

// Blocks of 256 with sixteen scales of eight bits: two bits of every level lie behind the others.
struct Six {
  static constexpr int ELEMENTS = 256, EACH = 16, UNIT = 128, BYTES = 210;
  static constexpr int BITS = 6;

  static void scales(const uint8_t* from, int count, float* scale, float* low) {
    float factors[2][MOST + LANES];
    halves<BYTES>(from + 206, count, factors[0], factors[1]);
    for (int i = 0; i < count; ++i, from += BYTES, scale += 16, low += 16)
      for (int j = 0; j < 16; j += LANES) {
        const Floats own = __builtin_convertvector((Ints)signed_bytes(from + 192 + j), Floats) * factors[1][i];
        store(scale + j, own);
        store(low + j, own * -32.0f);
      }
  }

  static Words level(const uint8_t* block, int unit, int e) {
    const Words high = (bytes(block + 128 + unit / 4 + e % 32) << 4) >> e / 32 * 2;
    return below(bytes(block + unit / 2 + e % 64) >> (e < 64 ? 0 : 4), high);
  }
};

// Weights as they are, in the call's type.
template <class T> struct Plain {};

// Calls with what reads weights of a kind: 0, plain ones, or GGML's number of a type of blocks. Of another one returns false.
template <class T, class Call> bool with_kind(int64_t kind, Call call) {
  switch (kind) {
    case 0: return call(Plain<T>{}), true;
    case 2: return call(Small<8, false>{}), true;
    case 3: return call(Small<0, false>{}), true;
    case 6: return call(Small<16, true>{}), true;
    case 7: return call(Small<0, true>{}), true;
    case 8: return call(Eight{}), true;
    case 12: return call(Large<false>{}), true;
    case 13: return call(Large<true>{}), true;
    case 14: return call(Six{}), true;
  }
  return false;
}

// Bytes of so many columns from the start of a row.
template <class T> constexpr int64_t bytes_of(Plain<T>, int64_t columns) { return columns * sizeof(T); }
template <class K> constexpr int64_t bytes_of(K, int64_t columns) { return columns / K::ELEMENTS * K::BYTES; }

// Whether so many columns are whole blocks.
template <class T> constexpr bool whole_blocks(Plain<T>, int64_t) { return true; }
template <class K> constexpr bool whole_blocks(K, int64_t columns) { return columns % K::ELEMENTS == 0; }

// Calls with each vector of weights of a block's unit, and where in it they are.
template <class K, class Call>
__attribute__((always_inline)) inline void each_weights(const uint8_t* block, int unit, const float* scale,
                                                        const float* low, Call call) {
#if LANES > 4
#pragma GCC unroll 16
#endif
  for (int e = 0; e < K::UNIT; e += LANES) {
    const int part = (unit + e) / K::EACH;
    const Words level = K::level(block, unit, e);
#if LANES == 16
    // Of few levels all weights that there are, one of which is looked up: bits above those of levels do not count.
    const Floats first = __builtin_convertvector((Ints)lane_numbers(), Floats);
    const Floats table = first * scale[part] + low[part];
    if constexpr (K::BITS == 4) {
      call(e, (Floats)_mm512_permutexvar_ps((__m512i)level, (__m512)table));
      continue;
    }
    if constexpr (K::BITS == 5) {
      const Floats upper = (first + 16.0f) * scale[part] + low[part];
      call(e, (Floats)_mm512_permutex2var_ps((__m512)table, (__m512i)level, (__m512)upper));
      continue;
    }
#endif
    const Words own = K::BITS == 8 ? level : level & ((1 << K::BITS) - 1);
    call(e, __builtin_convertvector((Ints)own, Floats) * scale[part] + low[part]);
  }
}

// Columns [first, last) of a row, each bound a multiple of STRETCH / 2, or `last` the row's end, to floats or rounded to
// other numbers.
template <class K, class Number> void unpack(const uint8_t* row, int64_t first, int64_t last, Number* to) {
  float scale[STRETCH / K::EACH + LANES], low[STRETCH / K::EACH + LANES];
  for (int64_t at = first / K::ELEMENTS * K::ELEMENTS; at < last; at += STRETCH) {
    const int64_t stop = std::min(at + STRETCH, last);
    const uint8_t* block = row + bytes_of(K{}, at);
    K::scales(block, (int)((stop - at + K::ELEMENTS - 1) / K::ELEMENTS), scale, low);
    for (int64_t d = at; d < stop; d += K::ELEMENTS, block += K::BYTES)
      for (int unit = 0; unit < K::ELEMENTS; unit += K::UNIT) {
        if (d + unit < first || d + unit >= stop) continue;
        const int64_t before = (d - at) / K::EACH;
        each_weights<K>(block, unit, scale + before, low + before, [&](int e, Floats weights) {
          store_rounded(to + d + unit + e - first, weights, LANES);
        });
      }
  }
}

}  // namespace
