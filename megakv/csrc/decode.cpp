// Attention of a few query rows: see decode.h.

#include <type_traits>

#include "decode.h"
#include "packed.h"
#include "rounding.h"

namespace {

// The same over packed rows `k_step` bytes apart: a head's part of a tile is unpacked into `buffer`, and read there.
template <int BITS>
void attend_packed(const float* q, const Run& run, const Packing& packing, const Shape& s, Range heads, Range seen,
                   State state, float* buffer) {
  const PackedRows<BITS> packed{(const uint8_t*)run.k, run.k_step, packing};
  float *const k = buffer, *const v = buffer + TILE * s.key_dim;
  for (int64_t first = seen.begin; first < seen.end; first += TILE) {
    const int count = (int)std::min<int64_t>(TILE, seen.end - first);
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const bool last = head + 1 == heads.end;
      const int64_t key = head * s.key_dim, value = s.kv_heads * s.key_dim + head * s.value_dim;
      const int64_t back = last ? head - heads.begin : -1, next = last ? first + TILE : first;
      packed.unpack(first, count, key, s.key_dim, k, next, key - back * s.key_dim, seen.end);
      packed.unpack(first, count, value, s.value_dim, v, next, value - back * s.value_dim, seen.end);
      const Rows<float> keys{k, s.key_dim, s.key_dim}, values{v, s.value_dim, s.value_dim};
      attend_head<float>(q, s, head, {keys, values, count, nullptr, nullptr}, state);
    }
  }
}

}  // namespace

// q [sequences, kv_heads, rows, key_dim] and the results [sequences, kv_heads, rows, value_dim] and
// [sequences, kv_heads, rows] are float32 and contiguous. A sequence's keys and values lie in its runs, from
// bounds[sequence] on, in the type (0 float32, 1 bfloat16, 2 float16), or packed where a packing is given.
// Returns how it ended: see `Fault`.
extern "C" int megakv_decode(int type, const Packing* packing, const float* q, int64_t sequences, const int64_t* bounds,
                             int64_t bound_count, const Run* runs, int64_t run_count, int64_t kv_heads, int64_t rows,
                             int64_t key_dim, int64_t value_dim, float scale, int threads, float* out, float* lse) {
  const Shape shape{kv_heads, rows, (int)key_dim, (int)value_dim};
  const Input input{q, runs, bounds, sequences};
  const auto check = [&] {
    require(kv_heads > 0 && rows >= 0 && key_dim >= 0 && value_dim >= 0 && threads > 0, Fault::SIZES);
    require(divides(bounds, bound_count, sequences, run_count), Fault::SEQUENCES);
  };
  const auto plain = [&](auto like) {
    typedef decltype(like) T;
    check();
    Runs{runs, runs + run_count}.check(kv_heads, key_dim, value_dim);
    const auto attend = [&](const float* query, const Run& run, Range heads, Range keys, State state) {
      attend_chunk<T>(query, run, shape, heads, keys, state);
    };
    decode(input, shape, scale, threads, attend, out, lse);
  };
  const auto packed = [&](auto bits) {
    check();
    require(packing->fits(kv_heads * (key_dim + value_dim)), Fault::SIZES);
    Runs{runs, runs + run_count}.check(1, packing->bytes(), 0);
    const int64_t size = TILE * (key_dim + value_dim);
    std::vector<float> buffers(threads * size);
    const auto attend = [&](const float* query, const Run& run, Range heads, Range keys, State state) {
      float* buffer = &buffers[omp_get_thread_num() * size];
      attend_packed<decltype(bits)::value>(query, run, *packing, shape, heads, keys, state, buffer);
    };
    decode(input, shape, scale, threads, attend, out, lse);
  };
  if (!packing) return typed(type, plain);
  return ended([&] {
    packing->bits == 4 ? packed(std::integral_constant<int, 4>{}) : packed(std::integral_constant<int, 8>{});
  });
}
