// Vectors of as many floats as the processor's registers hold, in the compiler's own terms (GCC, Clang): one text serves
// all processors.

#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#define LANES 16
#define BLOCK_ROWS 4
#elif defined(__AVX__)
#define LANES 8
#define BLOCK_ROWS 2
#else
#define LANES 4
#define BLOCK_ROWS 4
#endif
#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int32_t FourInts __attribute__((vector_size(16)));
typedef float Four __attribute__((vector_size(16)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline Words widened(const uint16_t* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
#if LANES == 16
  // GCC 12 takes the general way apart.
  return (Words)_mm512_cvtepu16_epi32((__m256i)bits);
#else
  return __builtin_convertvector(bits, Words);
#endif
}

inline Floats load(const BFloat16* from) { return (Floats)(widened(&from->bits) << 16); }

inline Floats load(const Float16* from) {
#if defined(__F16C__) && LANES == 16
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__) && LANES == 8
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  const Words bits = widened(&from->bits), exponent = bits & 0x7c00;
  // The exponent's bias differs by 112: a product of powers of two is exact, for subnormal numbers too.
  Words value = (Words)((Floats)((bits & 0x7fff) << 13) * 0x1p112f);
  value |= (Words)(exponent == 0x7c00) & 0x7f800000;
  return (Floats)(value | (bits & 0x8000) << 16);
#endif
}

template <class T> inline float scalar(const T* from) {
  T lanes[LANES] = {*from};
  return load(lanes)[0];
}

inline Floats all(float value) { return value - Floats{}; }

inline Floats exponential(Floats x) {
  // 2^n times a polynomial on [-ln(2)/2, ln(2)/2], within 1e-7 of the true value; 0 below the smallest normal number.
  const Floats rounding = all(12582912.0f);  // 1.5 * 2^23: what is added to it loses its fraction
  const Floats n = (x * 1.44269504088896341f + rounding) - rounding;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Ints tiny = x < -87.0f;
  return (Floats)(~tiny & (Ints)(p * (Floats)power));
}

// The larger one of each lane, `right` where one of the two is not a number.
inline Floats larger(Floats left, Floats right) {
#if LANES == 16
  return (Floats)_mm512_max_ps((__m512)left, (__m512)right);
#else
  return left > right ? left : right;
#endif
}

// 2^x within two and a half units of the last place. Where that is below the smallest normal number it is about that
// number: products with smaller ones are slow.
inline Floats power_of_two(Floats x) {
  x = larger(all(-126.0f), x);
#if LANES == 16 && defined(__AVX512DQ__)
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, 1);
#else
  const Floats rounding = all(12582912.0f);  // 1.5 * 2^23: what is added to it loses its fraction
  const Floats shifted = (x - 0.5f) + rounding;
  const Floats r = x - (shifted - rounding);
#endif
  Floats p = r * 0.00186713005f + 0.00901703071f;
  p = p * r + 0.0557999127f;
  p = p * r + 0.240164444f;
  p = p * r + 0.693151295f;
  p = p * r + 1.0f;
#if LANES == 16 && defined(__AVX512DQ__)
  return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
  return (Floats)((Words)p + ((Words)shifted << 23));
#endif
}

inline Floats hyperbolic_tangent(Floats x) {
  // Beyond 20 it is 1 in float32.
  x = x > 20.0f ? all(20.0f) : x;
  return 1.0f - 2.0f / (power_of_two(x * 2.88539008177792681f) + 1.0f);
}

template <class V> inline auto halved(V value) {
  typedef float Half __attribute__((vector_size(sizeof(V) / 2)));
  Half halves[2];
  std::memcpy(halves, &value, sizeof value);
  return halves[0] + halves[1];
}

inline Four folded(Floats value) {
#if LANES == 16
  return halved(halved(value));
#elif LANES == 8
  return halved(value);
#else
  return value;
#endif
}

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, FourInts{__VA_ARGS__})
#endif

// The sums of four vectors.
inline Four sums(Floats a, Floats b, Floats c, Floats d) {
  const Four e = folded(a), f = folded(b), g = folded(c), h = folded(d);
  const Four ef = SHUFFLED(e, f, 0, 4, 2, 6) + SHUFFLED(e, f, 1, 5, 3, 7);
  const Four gh = SHUFFLED(g, h, 0, 4, 2, 6) + SHUFFLED(g, h, 1, 5, 3, 7);
  return SHUFFLED(ef, gh, 0, 1, 4, 5) + SHUFFLED(ef, gh, 2, 3, 6, 7);
}

}  // namespace
