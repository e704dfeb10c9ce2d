// How calls end, and bounds of the tables that they are given. A table that does not fit is a mistake of whoever made it:
// the call says so before it has read or written what the table says.

#pragma once

#include <cstdint>
#include <new>

namespace {

// What calls return if not 0: memory is lacking, a channel says why its message did not come, or what does not fit.
enum class Fault : int { MEMORY = 1, MESSAGE, SIZES, SEQUENCES, RUNS, ROWS, WEIGHTS, RANKS, CHANNEL };

template <class Call> int ended(Call call) {
  try {
    call();
  } catch (const std::bad_alloc&) {
    return (int)Fault::MEMORY;
  } catch (const Fault& fault) {
    return (int)fault;
  }
  return 0;
}

inline void require(bool fits, Fault fault) {
  if (!fits) throw fault;
}

// Whether `dim` elements of each of so many rows, `step` apart, of each of so many heads lie within `size`.
inline bool within(int64_t size, int64_t heads, int64_t head, int64_t rows, int64_t step, int64_t dim) {
  typedef __int128 Wide;  // whatever the numbers are
  if (heads < 0 || rows < 0 || dim < 0 || head < 0 || step < 0) return false;
  return !heads || !rows || (Wide)(heads - 1) * head + (Wide)(rows - 1) * step + dim <= size;
}

// Whether so many bounds are those of `parts` that follow one another in a table of so many rows.
inline bool divides(const int64_t* bounds, int64_t count, int64_t parts, int64_t rows) {
  if (parts < 0 || count != parts + 1 || bounds[0] < 0 || bounds[parts] > rows) return false;
  for (int64_t part = 0; part < parts; ++part)
    if (bounds[part] > bounds[part + 1]) return false;
  return true;
}

}  // namespace
