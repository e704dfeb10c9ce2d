// Vectors of as many floats as the processor's registers hold, in the compiler's own terms (GCC, Clang): one text serves
// all processors.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

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
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int32_t FourInts __attribute__((vector_size(16)));
typedef uint32_t FourWords __attribute__((vector_size(16)));
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

inline Halves narrowed(Words value) {
#if LANES == 16
  return (Halves)_mm512_cvtepi32_epi16((__m512i)value);
#else
  return __builtin_convertvector(value, Halves);
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

// Bytes that memory gives at a time.
constexpr int64_t LINE_BYTES = 64;

// So many numbers will be read soon. GCC takes calls of a function that only fetches for such without effects, and leaves
// them out: it must be part of what calls it.
template <class T> __attribute__((always_inline)) inline void fetch(const T* from, int64_t count) {
  const char* const end = (const char*)(from + count);
  for (const char* at = (const char*)from; at < end; at += LINE_BYTES) __builtin_prefetch(at, 0, 2);
}

// The first lanes, and zeros for the others.
template <class T> inline Floats load(const T* from, int64_t count) {
  T lanes[LANES] = {};
  std::memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}

// Calls with every vector of a row's columns: where it begins, and how many of its lanes there are.
template <class Call> inline void each_vector(int64_t begin, int64_t end, Call call) {
  for (; begin + LANES <= end; begin += LANES) call(begin, (int64_t)LANES);
  if (begin < end) call(begin, end - begin);
}

template <class T> inline Floats some(const T* from, int64_t count) {
  return count == LANES ? load(from) : load(from, count);
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
// Numbers of lanes, in vectors of as many.
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, std::conditional_t<sizeof(a) == sizeof(Four), FourInts, Ints>{__VA_ARGS__})
#endif

// The sums of four vectors.
inline Four sums(Floats a, Floats b, Floats c, Floats d) {
  const Four e = folded(a), f = folded(b), g = folded(c), h = folded(d);
  const Four ef = SHUFFLED(e, f, 0, 4, 2, 6) + SHUFFLED(e, f, 1, 5, 3, 7);
  const Four gh = SHUFFLED(g, h, 0, 4, 2, 6) + SHUFFLED(g, h, 1, 5, 3, 7);
  return SHUFFLED(ef, gh, 0, 1, 4, 5) + SHUFFLED(ef, gh, 2, 3, 6, 7);
}

// Of two vectors in turn: the first two lanes of every four, or the last two; and pairs of lanes, the first or the last.
#if LANES == 16
#define FIRST_OF_TWO 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29
#define LAST_OF_TWO 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31
#define FIRST_PAIRS 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define LAST_PAIRS 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#elif LANES == 8
#define FIRST_OF_TWO 0, 8, 1, 9, 4, 12, 5, 13
#define LAST_OF_TWO 2, 10, 3, 11, 6, 14, 7, 15
#define FIRST_PAIRS 0, 1, 8, 9, 4, 5, 12, 13
#define LAST_PAIRS 2, 3, 10, 11, 6, 7, 14, 15
#else
#define FIRST_OF_TWO 0, 4, 1, 5
#define LAST_OF_TWO 2, 6, 3, 7
#define FIRST_PAIRS 0, 1, 4, 5
#define LAST_PAIRS 2, 3, 6, 7
#endif

// Four words of each of LANES / 4 rows, `step` bytes apart.
inline Words fours(const char* from, [[maybe_unused]] int64_t step) {
#if LANES == 16
  const auto four = [&](int row) { return _mm_loadu_si128((const __m128i*)(from + row * step)); };
  __m512i found = _mm512_castsi128_si512(four(0));
  found = _mm512_inserti32x4(found, four(1), 1);
  found = _mm512_inserti32x4(found, four(2), 2);
  return (Words)_mm512_inserti32x4(found, four(3), 3);
#elif LANES == 8
  return (Words)_mm256_loadu2_m128((const float*)(from + step), (const float*)from);
#else
  Words found;
  std::memcpy(&found, from, sizeof found);
  return found;
#endif
}

// Four words of each of LANES rows, `step` bytes apart: in found[i] those that come as i-th.
inline void across(const char* from, int64_t step, Words found[4]) {
  const int64_t next = 4 * step;
  const Words a = fours(from, next), b = fours(from + step, next);
  const Words c = fours(from + 2 * step, next), d = fours(from + 3 * step, next);
  const Words ab = SHUFFLED(a, b, FIRST_OF_TWO), cd = SHUFFLED(c, d, FIRST_OF_TWO);
  found[0] = SHUFFLED(ab, cd, FIRST_PAIRS), found[1] = SHUFFLED(ab, cd, LAST_PAIRS);
  const Words ab_last = SHUFFLED(a, b, LAST_OF_TWO), cd_last = SHUFFLED(c, d, LAST_OF_TWO);
  found[2] = SHUFFLED(ab_last, cd_last, FIRST_PAIRS), found[3] = SHUFFLED(ab_last, cd_last, LAST_PAIRS);
}

// The first number of every word, or the second one.
inline Floats number(Words words, int which, BFloat16) { return (Floats)(which ? words & 0xffff0000 : words << 16); }

inline Floats number(Words words, int which, Float16) {
  const Halves bits = narrowed(which ? words >> 16 : words);
  return load((const Float16*)&bits);
}

}  // namespace
