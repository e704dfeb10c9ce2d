// What a decoder layer of the Llama kind does around its attention, for a few rows on processors, and between
// products of many. Every step is rounded as where PyTorch computes it by itself.

#pragma once

#include <cmath>

#include "few_rows.h"

namespace {

// What the inside of a feed-forward may have at a time, with some rows at least.
constexpr int64_t BLOCK_ELEMENTS = 1 << 22, LEAST_BLOCK = 256;

enum Activation { SILU, GELU, GELU_TANH };

struct Norm {
  const void* weight;
  int64_t size;
  float eps;
};

struct Layer {
  int64_t type;   // 0 float32, 1 bfloat16, 2 float16
  int64_t pairs;  // many rows of bfloat16 are multiplied by pairs
  int64_t hidden, heads, kv_heads, head_dim, activation;
  Norm input_norm, output_norm, q_norm, k_norm;  // of the last two none, or one for each column of a head
  Linear q, k, v, o, gate, up, down;             // those of this rank

  Way way() const {
    bool blocks = false;
    for (const Linear* linear : {&q, &k, &v, &o, &gate, &up, &down}) blocks = blocks || linear->kind;
    return {pairs != 0, blocks};
  }

  // Columns of queries, keys and values: of all heads, and of those parts that this rank computes.
  int64_t columns() const { return (heads + 2 * kv_heads) * head_dim; }
  int64_t own_columns() const { return q.outputs + k.outputs + v.outputs; }

  void check() const {
    require(hidden > 0 && kv_heads > 0 && heads % kv_heads == 0 && head_dim > 0, Fault::SIZES);
    require(input_norm.size == hidden && output_norm.size == hidden, Fault::WEIGHTS);
    require((!q_norm.weight || q_norm.size == head_dim) && (!k_norm.weight || k_norm.size == head_dim), Fault::WEIGHTS);
    const auto fits = [&](const Linear& linear, int64_t inputs) {
      type ? linear.check(inputs, BFloat16{}) : linear.check(inputs, float{});
    };
    for (const Linear* linear : {&q, &k, &v, &gate, &up}) fits(*linear, hidden);
    fits(down, gate.outputs);
    fits(o, o.columns);
    require(up.outputs == gate.outputs && down.outputs == hidden && o.outputs == hidden, Fault::WEIGHTS);
  }
};

// An RMS norm of a row in float32: by its mean square, rounded, times its weight.
template <class T> void normalise(float* row, const Norm& norm) {
  const int64_t dim = norm.size;
  const T* const weight = (const T*)norm.weight;
  Floats squares{};
  each_vector(0, dim, [&](int64_t d, int64_t count) {
    const Floats own = some(row + d, count);
    squares += own * own;
  });
  const Four four = folded(squares);
  const float scale = 1.0f / std::sqrt((four[0] + four[1] + four[2] + four[3]) / dim + norm.eps);
  each_vector(0, dim, [&](int64_t d, int64_t count) {
    const Floats found = kept<T>(some(weight + d, count) * kept<T>(some(row + d, count) * scale));
    std::memcpy(row + d, &found, count * sizeof(float));
  });
}

// Norms and rotary embeddings of a row of heads, in place: halves of a head turn together.
template <class T>
void rotate(T* heads, int64_t count, int64_t dim, const Norm& norm, const T* cos, const T* sin, float* own) {
  const int64_t half = dim / 2;
  if (half % LANES == 0 && !norm.weight) {
    for (int64_t head = 0; head < count; ++head, heads += dim)
      for (int64_t d = 0; d < half; d += LANES) {
        const Floats first = load(heads + d), second = load(heads + half + d);
        const auto turned = [&](Floats x, Floats y, int64_t at) {
          const Floats found = kept<T>(x * load(cos + at)) + kept<T>(y * load(sin + at));
          store_rounded(heads + at, found, LANES);
        };
        turned(first, -second, d);
        turned(second, first, half + d);
      }
    return;
  }
  for (int64_t head = 0; head < count; ++head, heads += dim) {
    each_vector(0, dim, [&](int64_t d, int64_t lanes) { store_rounded(own + d, some(heads + d, lanes), lanes); });
    if (norm.weight) normalise<T>(own, norm);
    std::copy(own, own + half, own + dim);
    each_vector(0, dim, [&](int64_t d, int64_t lanes) {
      Floats turned = some(own + d + half, lanes);
      if (d + LANES <= half)
        turned = -turned;
      else
        for (int64_t lane = 0; d + lane < half; ++lane) turned[lane] = -turned[lane];
      store_rounded(heads + d,
                    kept<T>(some(own + d, lanes) * some(cos + d, lanes)) + kept<T>(turned * some(sin + d, lanes)),
                    lanes);
    });
  }
}

template <class T>
void rotate_all(const Layer& layer, int64_t rows, const T* cos, const T* sin, int threads, T* out) {
  const int64_t dim = layer.head_dim, step = layer.columns();
  divide(rows, rows * step, threads, 2 * dim + LANES, [&](int64_t first, int64_t last, float* own) {
    for (int64_t row = first; row < last; ++row) {
      T* const heads = out + row * step;
      rotate(heads, layer.heads, dim, layer.q_norm, cos + row * dim, sin + row * dim, own);
      rotate(heads + layer.heads * dim, layer.kv_heads, dim, layer.k_norm, cos + row * dim, sin + row * dim, own);
    }
  });
}

inline Floats activated(Floats x, int64_t kind) {
  // Of numbers beyond what exponentials reach nothing is left.
  if (kind == SILU) return x < -87.0f ? x * 0.0f : x / (1.0f + exponential(x < -87.0f ? all(0.0f) : -x));
  Floats y;
  if (kind == GELU_TANH) {
    const Floats inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
    const Floats size = inner < 0.0f ? -inner : inner, found = hyperbolic_tangent(size);
    y = inner < 0.0f ? -found : found;
  } else {
    for (int lane = 0; lane < LANES; ++lane) y[lane] = std::erf(x[lane] * 0.70710678118654752f);
  }
  return 0.5f * x * (1.0f + y);
}

// to = act(gate) * up, for columns [begin, end) of a row.
template <class T> void gated(const T* gate, const T* up, int64_t begin, int64_t end, int64_t kind, float* to) {
  each_vector(begin, end, [&](int64_t d, int64_t count) {
    const Floats found = kept<T>(kept<T>(activated(some(gate + d, count), kind)) * some(up + d, count));
    std::memcpy(to + d, &found, count * sizeof(float));
  });
}

// See megakv_normed.
template <class T, class P>
void normed(const Layer& layer, bool behind, int64_t rows, const T* x, const P* added, int threads, T* middle, P* out) {
  const int64_t hidden = layer.hidden;
  divide(rows, rows * hidden, threads, hidden, [&](int64_t first, int64_t last, float* own) {
    for (int64_t row = first * hidden; row < last * hidden; row += hidden) {
      each_vector(0, hidden, [&](int64_t d, int64_t count) {
        Floats found = some(x + row + d, count);
        if (added) {
          found = kept<T>(found + some(added + row + d, count));
          store_rounded(middle + row + d, found, count);
        }
        store_rounded(own + d, found, count);
      });
      normalise<T>(own, behind ? layer.output_norm : layer.input_norm);
      each_vector(0, hidden, [&](int64_t d, int64_t count) { store_rounded(out + row + d, some(own + d, count), count); });
    }
  });
}

// See megakv_gated.
template <class P>
void gated_rows(const Layer& layer, int64_t rows, int64_t width, P* gate, const P* up, int threads) {
  divide(rows, rows * width, threads, width, [&](int64_t first, int64_t last, float* own) {
    for (int64_t row = first * width; row < last * width; row += width) {
      gated(gate + row, up + row, 0, width, layer.activation, own);
      each_vector(0, width, [&](int64_t d, int64_t count) { store_rounded(gate + row + d, some(own + d, count), count); });
    }
  });
}

// This rank's queries, keys and values, before rotary embeddings, of hidden states.
template <class T> void project(const Layer& layer, int64_t rows, const T* x, int threads, T* out) {
  const int64_t hidden = layer.hidden;
  Inputs inputs(rows, hidden, layer.way());
  inputs.each_row(threads, [&](int64_t row, float* own) {
    each_vector(0, hidden, [&](int64_t d, int64_t count) { store_rounded(own + d, some(x + row * hidden + d, count), count); });
    normalise<T>(own, layer.input_norm);
  });
  const Linear linears[] = {layer.q, layer.k, layer.v};
  products(inputs, linears, 3, threads, out);
}

// to [rows, hidden] = the sum of what `ranks` ranks have, [ranks, rows, hidden], in their order, and a bias if there is one;
// added to `base` if there is one.
template <class T>
void add_parts(const Layer& layer, int64_t rows, const T* parts, int64_t ranks, const void* bias, const T* base, T* to) {
  const int64_t hidden = layer.hidden, step = rows * hidden;
  for (int64_t first = 0; first < step; first += hidden)
    each_vector(0, hidden, [&](int64_t d, int64_t count) {
      const T* const part = parts + first + d;
      Floats sum = some(part, count);
      for (int64_t rank = 1; rank < ranks; ++rank) sum += some(part + rank * step, count);
      sum = kept<T>(sum);
      if (bias) sum = kept<T>(sum + some((const T*)bias + d, count));
      store_rounded(to + first + d, base ? some(base + first + d, count) + sum : sum, count);
    });
}

// See megakv_feed_forward.
template <class T>
void feed_forward(const Layer& layer, int64_t rows, const T* x, const T* attended, bool projected, bool whole,
                  int threads, T* middle, T* out) {
  const int64_t hidden = layer.hidden, width = layer.gate.outputs;
  const int64_t most = std::max(BLOCK_ELEMENTS / std::max<int64_t>(width, 1), LEAST_BLOCK);
  if (rows >= 2 * most) {
    // Larger memory would be taken anew in every call.
    const int64_t parts = rows / most, inputs = projected ? hidden : layer.heads * layer.head_dim;
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first, at = first * hidden;
      feed_forward(layer, count, x + at, attended + first * inputs, projected, whole, threads, middle + at, out + at);
    }
    return;
  }
  const T* added = attended;
  Space<T> found(projected ? 0 : rows * hidden);
  if (!projected) {
    const Inputs inputs(attended, rows, layer.heads * layer.head_dim, layer.way(), threads);
    products(inputs, &layer.o, 1, threads, found.data());
    added = found.data();
  }
  Inputs inputs(rows, hidden, layer.way());
  inputs.each_row(threads, [&](int64_t row, float* own) {
    each_vector(row * hidden, (row + 1) * hidden, [&](int64_t d, int64_t count) {
      const Floats found = kept<T>(some(x + d, count) + some(added + d, count));
      store_rounded(middle + d, found, count);
      store_rounded(own + d - row * hidden, found, count);
    });
    normalise<T>(own, layer.output_norm);
  });
  Inputs inner(rows, width, layer.way());
  // Of many rows a block of gates is multiplied while it lies in the second cache, of few all that a thread has.
  const bool many = inputs.many();
  const int64_t block = Product<T>::block(inputs), scratch = Product<T>::scratch(inputs);
  const int64_t step = many ? GROUP * block : width, room = many ? 2 * rows * step : 0;
  const int64_t memory_each = scratch + room + GROUP * block;
  Space<T> gate(many ? 0 : rows * width), up(many ? 0 : rows * width);
  divide_both(Product<T>::blocks(inputs, width), rows, many, 2 * rows * hidden * width, threads, memory_each,
              [&](int64_t first, int64_t last, Span own, float* memory) {
                T* const gates = many ? (T*)(memory + scratch) : gate.data();
                T* const ups = many ? gates + rows * step : up.data();
                float* const gated_row = memory + scratch + room;
                for (int64_t at = first, next; at < last; at = next) {
                  next = many ? std::min(at + GROUP, last) : last;
                  const int64_t begin = at * block, end = std::min(next * block, width), origin = many ? begin : 0;
                  Product<T>(inputs, layer.gate, gates, step, origin).compute(at, next, own, memory);
                  Product<T>(inputs, layer.up, ups, step, origin).compute(at, next, own, memory);
                  for (int64_t row = own.begin; row < own.end; ++row) {
                    const int64_t from = row * step + begin - origin;
                    float* const to = inner.pairs && many ? gated_row : &inner.wide[row * inner.step] + begin;
                    gated(gates + from, ups + from, 0, end - begin, layer.activation, to);
                    if (inner.pairs) inner.keep(row, begin, end, to);
                  }
                }
              });
  inner.fix();
  products(inner, &layer.down, 1, threads, out);
  if (whole)
    divide(rows, rows * hidden, threads, 0, [&](int64_t first, int64_t last, float*) {
      each_vector(first * hidden, last * hidden, [&](int64_t d, int64_t count) {
        store_rounded(out + d, some(middle + d, count) + some(out + d, count), count);
      });
    });
}

}  // namespace
