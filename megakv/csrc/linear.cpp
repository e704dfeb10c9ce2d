// Few rows times a weight.

#include "few_rows.h"

// out [rows, outputs] = x [rows, columns] times the transpose of weight [outputs, columns], whose rows lie `step` elements
// apart, plus bias [outputs] where there is one; all in the type (0 float32, 1 bfloat16, 2 float16), x and out contiguous.
// Many rows of bfloat16 are multiplied by `pairs` if the processor has those. Returns 0, or 1 if there is no memory for x
// in float32.
extern "C" int megakv_product(int type, int pairs, const void* x, int64_t rows, int64_t columns, const void* weight,
                              int64_t step, int64_t outputs, const void* bias, int threads, void* out) {
  return typed(type, [&](auto like) {
    typedef decltype(like) T;
    const Linear linear{weight, step, outputs, bias};
    Inputs inputs((const T*)x, rows, columns, pairs, threads);
    inputs.ready(threads);
    products(inputs, &linear, 1, threads, (T*)out);
  });
}
