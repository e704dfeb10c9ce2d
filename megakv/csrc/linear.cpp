// Few rows times a weight.

#include "few_rows.h"

// out [rows, outputs] = x [rows, columns] times the transpose of weight [outputs, inputs], whose rows lie `step` bytes
// apart, plus bias [biases] where there is one; all in the type (0 float32, 1 bfloat16, 2 float16), x and out contiguous,
// but for weights in blocks, which GGML's number of their type says: `kind`, else 0.
// Many rows of bfloat16 are multiplied by `pairs` if the processor has those. Returns how it ended: see `Fault`.
extern "C" int megakv_product(int type, int pairs, const void* x, int64_t rows, int64_t columns, const void* weight,
                              int64_t step, int64_t outputs, int64_t inputs, const void* bias, int64_t biases,
                              int64_t kind, int threads, void* out) {
  return typed(type, [&](auto like) {
    typedef decltype(like) T;
    require(rows >= 0 && threads > 0, Fault::SIZES);
    const Linear linear{weight, step, outputs, inputs, bias, biases, kind};
    linear.check(columns, T{});
    Inputs given((const T*)x, rows, columns, {pairs != 0, kind != 0}, threads);
    products(given, &linear, 1, threads, (T*)out);
  });
}

// out [rows, columns] in the type = rows in blocks of a kind, `step` bytes apart. Returns how it ended: see `Fault`.
extern "C" int megakv_unpack(int type, const void* packed, int64_t step, int64_t rows, int64_t columns, int64_t kind,
                             int threads, void* out) {
  return typed(type, [&](auto like) {
    typedef decltype(like) T;
    require(kind && rows >= 0 && columns >= 0 && threads > 0, Fault::SIZES);
    const Linear linear{packed, step, rows, columns, nullptr, 0, kind};
    linear.check(columns, T{});
    divide(rows, rows * columns, threads, 0, [&](int64_t first, int64_t last, float*) {
      with_kind<T>(kind, [&](auto own) {
        if constexpr (!std::is_same_v<decltype(own), Plain<T>>)
          for (int64_t row = first; row < last; ++row)
            unpack<decltype(own)>((const uint8_t*)packed + row * step, 0, columns, (T*)out + row * columns);
      });
    });
  });
}
