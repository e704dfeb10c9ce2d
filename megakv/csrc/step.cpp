// A step of decoding in one layer: new keys and values go behind those that are there, and are attended to with them.
//
// Layers of few tokens take as long as their calls: what a step does between rotary embeddings and the output
// projection is one of them.

#include "step.h"

// Every sequence's runs lie from bounds[sequence] on, in the type (0 float32, 1 bfloat16, 2 float16). Where `stored` says
// so, its new key and value are written to the last place of its last run; then its query sees all keys but the first
// ones: those before row seen[sequence], where its runs begin with row first[sequence]; all of them if `seen` is null.
// The result is [sequences, heads, value_dim] in the type, with sinks [heads] where there are any; if it is `partial`,
// [sequences, heads, value_dim + 1] float32 whose last column is the log-sum-exp. Returns 0, or 1 if memory is lacking.
extern "C" int megakv_step(int type, const Step* step, const int64_t* bounds, const Run* runs,
                           const uint8_t* stored, const int64_t* first, const int64_t* seen, float scale,
                           const float* sinks, int partial, int threads, void* out) {
  return typed(type, [&](auto like) {
    attend_step<decltype(like)>(*step, bounds, runs, stored, first, seen, scale, sinks, partial, threads, out);
  });
}

// Merges `parts` partial results [parts, rows, dim + 1] over disjoint keys, in their order: [rows, dim] in the type. Rows
// are sequence after sequence, head after head; sinks are [heads].
extern "C" int megakv_merge(int type, const float* partial, int64_t parts, int64_t rows, int64_t heads, int64_t dim,
                            const float* sinks, void* out) {
  return typed(type, [&](auto like) {
    typedef decltype(like) T;
    merge_parts<T>(partial, parts, rows, heads, dim, sinks, (T*)out);
  });
}
