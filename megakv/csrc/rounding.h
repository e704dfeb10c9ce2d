// Floats in the types of models' tensors.

#pragma once

#include <memory>
#include <new>

#include "faults.h"
#include "vectors.h"

namespace {

// Memory for so many numbers, whatever they are at first: a vector would write each of them. That for none has an address.
// Vectors of them lie in one line of the cache each.
template <class T> class Space {
 public:
  explicit Space(int64_t count) : numbers((T*)::operator new(count * sizeof(T), LINE)), count(count) {}

  T* data() { return numbers.get(); }
  const T* data() const { return numbers.get(); }
  int64_t size() const { return count; }
  T& operator[](int64_t i) { return numbers[i]; }
  const T& operator[](int64_t i) const { return numbers[i]; }

 private:
  static constexpr std::align_val_t LINE{LINE_BYTES};
  struct Free {
    void operator()(T* numbers) const { ::operator delete(numbers, LINE); }
  };

  std::unique_ptr<T[], Free> numbers;
  int64_t count;
};

inline float rounded(float value, float) { return value; }

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// To the nearest, and of two equally near to the even one.
inline BFloat16 rounded(float value, BFloat16) {
  const uint32_t bits = bits_of(value);
  if (value != value) return {0x7fc0};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline Float16 rounded(float value, Float16) {
  const uint32_t bits = bits_of(value), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  uint32_t found;
  if (size >= 0x47800000) {
    found = size > 0x7f800000 ? 0x7e00 : 0x7c00;
  } else if (size < 0x38800000) {
    // Subnormal: adding 0.5 leaves as many digits as there are.
    float positive;
    std::memcpy(&positive, &size, sizeof size);
    found = bits_of(positive + 0.5f) - bits_of(0.5f);
  } else {
    found = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  }
  return {(uint16_t)(sign | found)};
}

// Lanes in a type: the first `count` of them are written.
inline void store_rounded(float* to, Floats value, int64_t count) { std::memcpy(to, &value, count * sizeof *to); }

inline void store_rounded(BFloat16* to, Floats value, int64_t count) {
  const Words bits = (Words)value;
  const Ints none = value != value;
  const Words found = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Halves halves = narrowed(((Words)none & 0x7fc0) | (~(Words)none & found));
  std::memcpy(to, &halves, count * sizeof *to);
}

inline void store_rounded(Float16* to, Floats value, int64_t count) {
#if defined(__F16C__) && LANES == 16
  const __m256i halves = _mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy(to, &halves, count * sizeof *to);
#elif defined(__F16C__) && LANES == 8
  const __m128i halves = _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(to, &halves, count * sizeof *to);
#else
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = rounded(value[lane], Float16{});
#endif
}

// A value as it is in a type.
template <class T> inline Floats kept(Floats value) {
  T lanes[LANES];
  store_rounded(lanes, value, LANES);
  return load(lanes);
}

// Calls with a number of the type (0 float32, 1 bfloat16, 2 float16), and says how that ended.
template <class Call> int typed(int64_t type, Call call) {
  return ended([&] {
    require(type >= 0 && type <= 2, Fault::SIZES);
    if (type == 0) call(float{});
    if (type == 1) call(BFloat16{});
    if (type == 2) call(Float16{});
  });
}

}  // namespace
