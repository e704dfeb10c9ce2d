// A step of a few rows in one layer: new keys and values go behind those that are there, and are attended to with them.
//
// Layers of few tokens take as long as their calls: what a step does between rotary embeddings and the output
// projection is one of them.

#include "step.h"

// Of sequence s the new rows lie from begins[s] on, ascending, and the runs from bounds[s] on, in the type (0 float32, 1
// bfloat16, 2 float16). The rows that are `stored` are written to the last places of their runs, in their order; then each
// query sees all keys but those that come behind it, and those before row seen[query], where the runs begin with row
// first[s]; from the first one on if `seen` is null. The result is [rows, heads, value_dim] in the type, with sinks [heads]
// where there are any; if it is `partial`, [rows, heads, value_dim + 1] float32 whose last column is the log-sum-exp.
// Returns how it ended: see `Fault`.
extern "C" int megakv_step(int type, const Step* step, const Held* held, float scale, const float* sinks,
                           int64_t sink_count, int partial, int threads, void* out) {
  return typed(type, [&](auto like) {
    require(step->kv_heads > 0 && step->heads % step->kv_heads == 0 && threads > 0, Fault::SIZES);
    require(!sinks || sink_count == step->heads, Fault::SIZES);
    held->check(step->rows, step->kv_heads, step->key_dim, step->value_dim);
    attend_step<decltype(like)>(*step, *held, scale, sinks, partial, threads, out);
  });
}

// Merges `parts` partial results [parts, rows, dim + 1] over disjoint keys, `size` numbers, in their order: [rows, dim] in
// the type. Rows are sequence after sequence, head after head; sinks are [heads].
extern "C" int megakv_merge(int type, const float* partial, int64_t size, int64_t parts, int64_t rows, int64_t heads,
                            int64_t dim, const float* sinks, int64_t sink_count, void* out) {
  return typed(type, [&](auto like) {
    typedef decltype(like) T;
    require(parts > 0 && dim >= 0 && within(size, parts, rows * (dim + 1), rows, dim + 1, dim + 1), Fault::ROWS);
    require(heads > 0 && (!sinks || sink_count == heads), Fault::SIZES);
    merge_parts<T>(partial, parts, rows, heads, dim, sinks, (T*)out);
  });
}
