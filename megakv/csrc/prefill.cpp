// Attention of many query rows: see prefill.h.

#include "prefill.h"
#include "rounding.h"

using namespace many;

// q [heads, rows, key_dim], and k [kv_heads, keys, key_dim] and v [kv_heads, keys, value_dim] in runs, in the problem's
// type, each token's elements side by side. The results [rows, heads, value_dim] and [rows, heads] are float32 and
// contiguous. Returns how it ended: see `Fault`.
extern "C" int megakv_prefill(const Problem* problem, const void* q, const Run* runs, int64_t count, int threads,
                              float* out, float* lse) {
  return typed(problem->type, [&](auto like) {
    typedef decltype(like) T;
    require(count >= 0 && threads > 0, Fault::SIZES);
    problem->check({runs, runs + count});
    with_cell<T>(problem->pairs, [&](auto cell) {
      prefill<T, decltype(cell)>(*problem, q, {runs, runs + count}, threads, out, lse);
    });
  });
}

// Whether a problem's `pairs` can be other than 0: compiled so, and on a processor that has them.
extern "C" int megakv_prefill_pairs() {
#ifdef __AVX512BF16__
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return 0;
#endif
}
