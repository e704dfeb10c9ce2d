// Rows in four or eight bits: see `GroupQuantiser` of megakv/offload/row_format.py.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

// How rows of `width` elements are packed: levels, two in a byte where they have four bits, the first one below; then a
// step for each group of elements, and then a smallest value, float16 where `halves`, else float32.
struct Packing {
  int64_t bits, group, width, halves;

  // Whether rows of so many elements are packed so.
  bool fits(int64_t elements) const {
    return (bits == 4 || bits == 8) && group > 0 && width % group == 0 && elements <= width;
  }

  // Bytes of a row.
  int64_t bytes() const { return (width * bits + 7) / 8 + width / group * (halves ? 4 : 8); }
};

typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef uint8_t HalfBytes __attribute__((vector_size(LANES / 2)));
typedef uint16_t Pairs __attribute__((vector_size(LANES)));

template <int BITS> inline Floats levels(const uint8_t* from) {
  Bytes found;
  if (BITS == 8) {
    std::memcpy(&found, from, sizeof found);
  } else {
    HalfBytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    // In memory the low byte of a pair comes first.
    const Pairs pairs = __builtin_convertvector(bytes, Pairs);
    found = (Bytes)((pairs & 15) | (pairs & 0xf0) << 4);
  }
  return __builtin_convertvector(__builtin_convertvector(found, Ints), Floats);
}

template <int BITS> struct PackedRows {
  const uint8_t* first;
  int64_t step;
  Packing packing;

  // Elements [begin, begin + dim) of rows [row, row + count) to [count, dim] floats. Meanwhile those from `next_begin`
  // on of as many rows from `next_row` on are fetched, as far as there are any before `end`.
  void unpack(int64_t row, int count, int64_t begin, int dim, float* to, int64_t next_row, int64_t next_begin,
              int64_t end) const {
    const int64_t groups = packing.width / packing.group, bytes = (int64_t)dim * BITS / 8;
    for (int i = 0; i < count; ++i, to += dim) {
      const uint8_t* const own = first + (row + i) * step;
      if (next_row + i < end)
        for (int64_t byte = 0; byte < bytes; byte += 64)
          __builtin_prefetch(first + (next_row + i) * step + next_begin * BITS / 8 + byte, 0, 2);
      const uint8_t* const scales = own + (packing.width * BITS + 7) / 8;
      for (int d = 0; d < dim;) {
        const int64_t group = (begin + d) / packing.group;
        const float factor = scale(scales, group), low = scale(scales, groups + group);
        const int stop = std::min<int64_t>(dim, d + packing.group);
        // In four bits a vector begins with a byte.
        if ((begin + d) % 2 == 0)
          for (; d + LANES <= stop; d += LANES) {
            const Floats found = levels<BITS>(own + (begin + d) * BITS / 8) * factor + low;
            std::memcpy(to + d, &found, sizeof found);
          }
        for (; d < stop; ++d) to[d] = level(own, begin + d) * factor + low;
      }
    }
  }

 private:
  static float level(const uint8_t* row, int64_t element) {
    return BITS == 8 ? row[element] : row[element / 2] >> element % 2 * 4 & 15;
  }

  float scale(const uint8_t* scales, int64_t index) const {
    float found;
    if (!packing.halves) {
      std::memcpy(&found, scales + 4 * index, sizeof found);
      return found;
    }
    Float16 half;
    std::memcpy(&half, scales + 2 * index, sizeof half);
    return scalar(&half);
  }
};

}  // namespace
