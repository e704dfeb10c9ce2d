// Few rows times a weight, for processors: each weight is read once, in its type, as fast as memory gives it.
//
// Decoding multiplies a row or a few by every weight of a model: as in attention of a few query rows, reading is the work.
// Of more rows of 16 bits the lanes are rows, and weights are widened once, into the first cache.

#include <algorithm>
#include <new>
#include <omp.h>
#include <vector>

#include "products.h"
#include "rounding.h"
#include "vectors.h"

namespace {

// Rows of the weight that are read side by side.
constexpr int64_t SIDE = 4;
// Rows of x whose products with them are in registers at a time.
constexpr int64_t MOST_ROWS = LANES == 16 ? 6 : 4;
// Rows beyond which lanes are rows, and those of the weight that are then widened at a time.
constexpr int64_t FEW = 20;
constexpr int64_t WIDENED = 12;
// Columns whose products are summed up in one running sum there.
constexpr int64_t LANE_RUN = 256;
// Columns whose products are summed up in one running sum: more would cost digits.
constexpr int64_t RUN = 128 * LANES;
// Multiplications that are not worth a second thread.
constexpr int64_t LEAST_WORK = 1 << 16;

// The first lanes, and zeros for the others.
template <class T> inline Floats load(const T* from, int64_t count) {
  T lanes[LANES] = {};
  std::memcpy(lanes, from, count * sizeof(T));
  return load(lanes);
}

// total[r][i] = x[r] . weight[i] for R rows of x, `x_step` apart, and four of the weight, with so many columns; those of x
// go on with zeros up to a multiple of LANES. Meanwhile fetches what lies `ahead` elements further on, if anything does.
template <class T, int R>
void multiply(const float* x, int64_t x_step, const T* const weight[SIDE], int64_t columns, int64_t ahead, Four total[R]) {
  const int64_t whole = columns / LANES * LANES;
  for (int r = 0; r < R; ++r) total[r] = Four{};
  for (int64_t first = 0; first < whole; first += RUN) {
    const int64_t last = std::min(first + RUN, whole);
    Floats sum[R][SIDE] = {};
    for (int64_t d = first; d < last; d += LANES) {
      Floats each[SIDE];
      for (int i = 0; i < SIDE; ++i) each[i] = load(weight[i] + d);
      if (ahead && d * sizeof(T) % 64 == 0)
        for (int i = 0; i < SIDE; ++i) __builtin_prefetch(weight[i] + ahead + d, 0, 2);
      for (int r = 0; r < R; ++r) {
        const Floats own = load(x + r * x_step + d);
        for (int i = 0; i < SIDE; ++i) sum[r][i] += own * each[i];
      }
    }
    for (int r = 0; r < R; ++r) total[r] += sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
  }
  if (whole == columns) return;
  Floats each[SIDE];
  for (int i = 0; i < SIDE; ++i) each[i] = load(weight[i] + whole, columns - whole);
  for (int r = 0; r < R; ++r) {
    const Floats own = load(x + r * x_step + whole);
    total[r] += sums(own * each[0], own * each[1], own * each[2], own * each[3]);
  }
}

template <class T> struct Product {
  const float *x, *across;  // rows of x, and its columns: [columns, lanes of all rows]
  int64_t x_step, rows, columns;
  const T *weight, *bias;
  int64_t step, outputs;  // elements from one row of the weight to the next; how many rows it has
  T* out;

  // Those of rows [begin, end) of the weight.
  void compute(int64_t begin, int64_t end) const {
    for (int64_t at = begin; at < end; at += SIDE) {
      const T* side[SIDE];
      // Beyond the last row that one is taken again.
      for (int i = 0; i < SIDE; ++i) side[i] = weight + std::min(at + i, end - 1) * step;
      int64_t ahead = at + 2 * SIDE <= end ? SIDE * step : 0;
      for (int64_t row = 0; row < rows; ahead = 0) {
        const int64_t left = rows - row;
        if (left >= 5 && MOST_ROWS == 6)
          row += left == 5 ? some<5>(row, side, at, end, ahead) : some<6>(row, side, at, end, ahead);
        else if (left >= 4)
          row += some<4>(row, side, at, end, ahead);
        else if (left == 3)
          row += some<3>(row, side, at, end, ahead);
        else
          row += left == 2 ? some<2>(row, side, at, end, ahead) : some<1>(row, side, at, end, ahead);
      }
    }
  }

  static int64_t scratch(int64_t rows, int64_t columns) {
    return WIDENED * (std::min(columns, LANE_RUN) + 2 * ((rows + LANES - 1) / LANES * LANES));
  }

  // The same of more rows, with memory for so many floats.
  void compute_many(int64_t begin, int64_t end, float* memory) const {
    const int64_t vectors = (rows + LANES - 1) / LANES, lanes = vectors * LANES, wide = std::min(columns, LANE_RUN);
    float *const widened = memory, *const run = widened + WIDENED * wide, *const total = run + WIDENED * lanes;
    for (int64_t at = begin; at < end; at += WIDENED) {
      const int64_t count = std::min(WIDENED, end - at);
      for (int64_t first = 0; first < columns; first += LANE_RUN) {
        const int64_t length = std::min(LANE_RUN, columns - first);
        for (int64_t i = 0; i < count; ++i) {
          const T* const from = weight + (at + i) * step + first;
          float* const to = widened + i * wide;
          const int64_t whole = length / LANES * LANES;
          for (int64_t d = 0; d < whole; d += LANES) store(to + d, load(from + d));
          for (int64_t d = whole; d < length; ++d) to[d] = scalar(from + d);
        }
        float* const sums = first ? run : total;
        ::multiply<false>(count, vectors, widened, wide, 1, across + first * lanes, lanes, length, sums, lanes, nullptr,
                          true);
        for (int64_t i = 0; first && i < count * lanes; i += LANES) store(total + i, load(total + i) + load(run + i));
      }
      for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < count; ++i)
          out[row * outputs + at + i] = rounded(total[i * lanes + row] + (bias ? scalar(bias + at + i) : 0.0f), T{});
    }
  }

  template <int R> int some(int64_t row, const T* const side[SIDE], int64_t at, int64_t end, int64_t ahead) const {
    Four total[R];
    multiply<T, R>(x + row * x_step, x_step, side, columns, ahead, total);
    for (int r = 0; r < R; ++r)
      for (int64_t i = at; i < std::min(at + SIDE, end); ++i)
        out[(row + r) * outputs + i] = rounded(total[r][i - at] + (bias ? scalar(bias + i) : 0.0f), T{});
    return R;
  }
};

}  // namespace

// out [rows, outputs] = x [rows, columns] times the transpose of weight [outputs, columns], whose rows lie `step` elements
// apart, plus bias [outputs] where there is one; all in the type (0 float32, 1 bfloat16, 2 float16), x and out contiguous.
// Returns 0, or 1 if there is no memory for x in float32.
extern "C" int megakv_product(int type, const void* x, int64_t rows, int64_t columns, const void* weight, int64_t step,
                              int64_t outputs, const void* bias, int threads, void* out) {
  const auto typed = [&](auto like) {
    typedef decltype(like) T;
    const int64_t x_step = (columns + LANES - 1) / LANES * LANES;
    std::vector<float> wide(rows * x_step);
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t d = 0; d < columns; d += LANES) {
        const Floats own = load((const T*)x + row * columns + d, std::min<int64_t>(LANES, columns - d));
        std::memcpy(&wide[row * x_step + d], &own, sizeof own);
      }
    const bool many = rows > FEW && sizeof(T) < sizeof(float);
    const int64_t lanes = many ? (rows + LANES - 1) / LANES * LANES : 0, block = many ? WIDENED : SIDE;
    std::vector<float> across(columns * lanes);
    for (int64_t d = 0; many && d < columns; ++d)
      for (int64_t row = 0; row < rows; ++row) across[d * lanes + row] = wide[row * x_step + d];
    const Product<T> product{wide.data(), across.data(), x_step, rows, columns, (const T*)weight, (const T*)bias, step,
                             outputs, (T*)out};
    const int64_t sides = (outputs + block - 1) / block;
    const int64_t scratch = many ? Product<T>::scratch(rows, columns) : 0;
    const int64_t workers = rows * columns * outputs < LEAST_WORK ? 1 : std::min<int64_t>(threads, sides);
    // Nothing may be thrown where several threads are.
    std::vector<float> memory(workers * scratch);
    const auto compute = [&](int64_t begin, int64_t end, int64_t own) {
      many ? product.compute_many(begin, end, memory.data() + own * scratch) : product.compute(begin, end);
    };
    if (workers == 1) return compute(0, outputs, 0);
#pragma omp parallel for num_threads(workers) schedule(static, 1)
    for (int64_t own = 0; own < workers; ++own)
      compute(sides * own / workers * block, std::min(outputs, sides * (own + 1) / workers * block), own);
  };
  try {
    if (type == 0) typed(float{});
    if (type == 1) typed(BFloat16{});
    if (type == 2) typed(Float16{});
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
