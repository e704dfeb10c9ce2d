// Attention of many query rows: see prefill.h.

#include <new>

#include "prefill.h"

using namespace many;

// q [heads, rows, key_dim], k [kv_heads, keys, key_dim] and v [kv_heads, keys, value_dim] in the problem's type, each
// token's elements side by side. The results [rows, heads, value_dim] and [rows, heads] are float32 and contiguous.
// Returns 0, or 1 if there is no memory for tiles.
extern "C" int megakv_prefill(const Problem* problem, const void* q, const void* k, const void* v, int threads,
                              float* out, float* lse) {
  try {
    const auto call = [&](auto type, auto cell) {
      prefill<decltype(type), decltype(cell)>(*problem, q, k, v, threads, out, lse);
    };
#ifdef __AVX512BF16__
    if (problem->pairs) return call(BFloat16{}, Pair{}), 0;
#endif
    if (problem->type == 0) call(float{}, float{});
    if (problem->type == 1) call(BFloat16{}, float{});
    if (problem->type == 2) call(Float16{}, float{});
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

// Whether a problem's `pairs` can be other than 0: compiled so, and on a processor that has them.
extern "C" int megakv_prefill_pairs() {
#ifdef __AVX512BF16__
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return 0;
#endif
}
