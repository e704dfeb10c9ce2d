// Few rows times a weight.

#include "few_rows.h"

// out [rows, outputs] = x [rows, columns] times the transpose of weight [outputs, inputs], whose rows lie `step` elements
// apart, plus bias [biases] where there is one; all in the type (0 float32, 1 bfloat16, 2 float16), x and out contiguous.
// Many rows of bfloat16 are multiplied by `pairs` if the processor has those. Returns how it ended: see `Fault`.
extern "C" int megakv_product(int type, int pairs, const void* x, int64_t rows, int64_t columns, const void* weight,
                              int64_t step, int64_t outputs, int64_t inputs, const void* bias, int64_t biases,
                              int threads, void* out) {
  return typed(type, [&](auto like) {
    typedef decltype(like) T;
    require(rows >= 0 && threads > 0, Fault::SIZES);
    const Linear linear{weight, step, outputs, inputs, bias, biases};
    linear.check(columns);
    Inputs given((const T*)x, rows, columns, pairs, threads);
    products(given, &linear, 1, threads, (T*)out);
  });
}
