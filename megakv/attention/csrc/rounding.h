// Floats in the types of models' tensors.

#pragma once

#include "vectors.h"

namespace {

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

}  // namespace
