// Decoder layers of the Llama kind, for a few rows on processors: see layer.h.
//
// Layers of few tokens take as long as their calls: norms, projections and rotary embeddings are one of them, and what
// comes behind attention is another. Of a step of decoding all layers are one, with all that ranks exchange in them.

#include "channel.h"
#include "layer.h"
#include "step.h"

namespace {

// What ranks divide of a layer, and how they exchange it; none where this one has all of it.
struct Ranks {
  Channel *inputs, *attention, *outputs, *feed_forward;
  const int64_t* widths;  // columns of queries, keys and values together, of each of so many ranks
  int64_t width_count;
  int64_t outputs_first, outputs_columns;  // those of what was attended to that this rank projects
  const void* outputs_bias;                // of sums, as the other one
  int64_t outputs_biases;
  const void* feed_forward_bias;
  int64_t feed_forward_biases;

  void check(const Layer& layer) const {
    for (const Channel* channel : {inputs, attention, outputs, feed_forward})
      if (channel) channel->check();
    if (inputs) {
      require(width_count == inputs->ranks && widths[inputs->own] == layer.own_columns(), Fault::RANKS);
      require(*std::min_element(widths, widths + width_count) >= 0, Fault::RANKS);
      require(std::accumulate(widths, widths + width_count, (int64_t)0) == layer.columns(), Fault::RANKS);
    } else {
      require(layer.own_columns() == layer.columns(), Fault::WEIGHTS);
    }
    const int64_t attended = layer.heads * layer.head_dim, columns = outputs ? outputs_columns : attended;
    require(!columns || layer.o.columns == columns, Fault::RANKS);
    require(!outputs || within(attended, 1, 0, 2, outputs_first, columns), Fault::RANKS);
    require(!outputs_bias || outputs_biases == layer.hidden, Fault::RANKS);
    require(!feed_forward_bias || feed_forward_biases == layer.hidden, Fault::RANKS);
  }
};

// What of a layer takes its time, and seconds since the call began at which that began and ended.
enum Part { INPUTS, ATTENTION, PARTIAL, OUTPUTS, FEED_FORWARD, PARTS };

class Moments {
 public:
  Moments(double* at, double begun) : at(at), begun(begun) {}

  template <class Call> void of(Part part, Call call) {
    at[2 * part] = now() - begun;
    call();
    at[2 * part + 1] = now() - begun;
  }

  // What all ranks have, [ranks, elements].
  template <class T> Space<T> gathered(Part part, Channel& channel, const Space<T>& own) {
    Space<T> all(channel.ranks * own.size());
    of(part, [&] { exchange(channel, own.data(), own.size() * sizeof(T), all.data()); });
    return all;
  }

 private:
  double* at;
  double begun;
};

// Queries, keys and values of all heads, of which each rank computes a run of columns.
template <class T>
void project_together(const Layer& layer, const Ranks& ranks, int64_t rows, const T* x, int threads, int64_t columns,
                      T* packed, Moments& moments) {
  Channel& channel = *ranks.inputs;
  const int64_t width = ranks.widths[channel.own], widest = *std::max_element(ranks.widths, ranks.widths + channel.ranks);
  Space<T> found(rows * width), own(rows * widest);
  project(layer, rows, x, threads, found.data());
  for (int64_t row = 0; row < rows; ++row) std::copy_n(&found[row * width], width, &own[row * widest]);
  const Space<T> all = moments.gathered(INPUTS, channel, own);
  for (int64_t rank = 0, first = 0; rank < channel.ranks; first += ranks.widths[rank++])
    for (int64_t row = 0; row < rows; ++row)
      std::copy_n(&all[(rank * rows + row) * widest], ranks.widths[rank], packed + row * columns + first);
}

template <class T>
void token_layer(const Layer& layer, const Ranks& ranks, const Held& held, int64_t rows, const T* x, const T* cos,
                 const T* sin, float scale, int threads, T* out, Moments& moments) {
  const int64_t dim = layer.head_dim, width = layer.heads * dim, columns = layer.columns();
  const int64_t hidden = layer.hidden;
  Space<T> packed(rows * columns), attended(rows * width);
  if (ranks.inputs)
    project_together(layer, ranks, rows, x, threads, columns, packed.data(), moments);
  else
    project(layer, rows, x, threads, packed.data());
  rotate_all(layer, rows, cos, sin, threads, packed.data());

  const auto heads = [&](int64_t first) { return Heads{&packed[first], dim, columns}; };
  const Step step{layer.pairs, rows, layer.heads, layer.kv_heads, dim, dim, heads(0), heads(width),
                  heads(width + layer.kv_heads * dim)};
  const auto attend = [&](bool partial, void* to) {
    moments.of(ATTENTION, [&] {
      attend_step<T>(step, held, scale, nullptr, partial, threads, to);
    });
  };
  if (ranks.attention) {
    Space<float> own(rows * layer.heads * (dim + 1));
    attend(true, own.data());
    const Space<float> all = moments.gathered(PARTIAL, *ranks.attention, own);
    merge_parts(all.data(), ranks.attention->ranks, rows * layer.heads, layer.heads, dim, nullptr, attended.data());
  } else {
    attend(false, attended.data());
  }

  if (ranks.outputs) {
    Space<T> own(rows * hidden);
    if (ranks.outputs_columns) {
      Inputs inputs(attended.data() + ranks.outputs_first, rows, ranks.outputs_columns, layer.way(), threads, width);
      products(inputs, &layer.o, 1, threads, own.data());
    } else {
      std::fill_n(own.data(), own.size(), T{});
    }
    const Space<T> all = moments.gathered(OUTPUTS, *ranks.outputs, own);
    attended = Space<T>(rows * hidden);
    add_parts<T>(layer, rows, all.data(), ranks.outputs->ranks, ranks.outputs_bias, nullptr, attended.data());
  }

  Space<T> middle(rows * hidden), own(ranks.feed_forward ? rows * hidden : 0);
  feed_forward(layer, rows, x, attended.data(), ranks.outputs, !ranks.feed_forward, threads, middle.data(),
               ranks.feed_forward ? own.data() : out);
  if (ranks.feed_forward) {
    const Space<T> all = moments.gathered(FEED_FORWARD, *ranks.feed_forward, own);
    add_parts(layer, rows, all.data(), ranks.feed_forward->ranks, ranks.feed_forward_bias, middle.data(), out);
  }
}

}  // namespace

// What does not change from one step to the next.
struct TokenLayer {
  const Layer* layer;
  const Ranks* ranks;
  double scale;

  // Whether rows go through it behind those of the first layer.
  void check(const Layer& first, const Held& held, int64_t rows) const {
    layer->check();
    ranks->check(*layer);
    held.check(rows, layer->kv_heads, layer->head_dim, layer->head_dim);
    const bool alike = layer->type == first.type && layer->hidden == first.hidden && layer->head_dim == first.head_dim;
    require(alike, Fault::WEIGHTS);
  }
};

// `count` whole layers of `given` ones, one behind the other, of a few rows of each sequence: out [rows, hidden] of
// x [rows, hidden], with rotary embeddings [rows, head_dim]. `at` [given, 5, 2] is written where something took place.
// Returns how it ended: see `Fault`.
extern "C" int megakv_token_layers(const TokenLayer* layers, int64_t given, const Held* held, int64_t count, int64_t rows,
                                   const void* x, const void* cos, const void* sin, int threads, void* out, double* at) {
  const double begun = now();
  return typed(layers->layer->type, [&](auto like) {
    typedef decltype(like) T;
    require(count <= given && threads > 0, Fault::SIZES);
    for (int64_t i = 0; i < count; ++i) layers[i].check(*layers->layer, held[i], rows);
    // By turns: a layer's results are the next one's hidden states.
    Space<T> turns[2]{Space<T>(0), Space<T>(0)};
    const T* from = (const T*)x;
    for (int64_t i = 0; i < count; ++i) {
      Space<T>& own = turns[i % 2];
      if (i + 1 < count && !own.size()) own = Space<T>(rows * layers[i].layer->hidden);
      T* const to = i + 1 < count ? own.data() : (T*)out;
      Moments moments(at + 2 * PARTS * i, begun);
      token_layer(*layers[i].layer, *layers[i].ranks, held[i], rows, from, (const T*)cos, (const T*)sin,
                  (float)layers[i].scale, threads, to, moments);
      from = to;
    }
  });
}

// Calls with a number of the type of a layer that fits together.
template <class Call> int layered(const Layer& layer, Call call) {
  return typed(layer.type, [&](auto like) {
    layer.check();
    call(like);
  });
}

// out [rows, (heads + 2 kv_heads) head_dim] = this rank's queries, keys and values of hidden states x [rows, hidden]; with
// rotary embeddings [rows, head_dim] where they are given, and all heads are here.
extern "C" int megakv_project(const Layer* layer, int64_t rows, const void* x, const void* cos, const void* sin,
                              int threads, void* out) {
  return layered(*layer, [&](auto like) {
    typedef decltype(like) T;
    require(!cos || layer->own_columns() == layer->columns(), Fault::WEIGHTS);
    project(*layer, rows, (const T*)x, threads, (T*)out);
    if (cos) rotate_all(*layer, rows, (const T*)cos, (const T*)sin, threads, (T*)out);
  });
}

// Norms and rotary embeddings of all heads, in place.
extern "C" int megakv_rotate(const Layer* layer, int64_t rows, const void* cos, const void* sin, int threads,
                             void* out) {
  return layered(*layer, [&](auto like) {
    typedef decltype(like) T;
    rotate_all(*layer, rows, (const T*)cos, (const T*)sin, threads, (T*)out);
  });
}

// Hidden states x [rows, hidden] plus attention's output, from what was attended to, or `projected` already: `middle`. Then
// what this rank's columns of the feed-forward make of them: out [rows, hidden], added to `middle` if it is the `whole`.
extern "C" int megakv_feed_forward(const Layer* layer, int64_t rows, const void* x, const void* attended, int projected,
                                   int whole, int threads, void* middle, void* out) {
  return layered(*layer, [&](auto like) {
    typedef decltype(like) T;
    require(projected || layer->o.columns == layer->heads * layer->head_dim, Fault::WEIGHTS);
    feed_forward(*layer, rows, (const T*)x, (const T*)attended, projected, whole, threads, (T*)middle, (T*)out);
  });
}

// out [rows, hidden] = `middle` plus the sum of what `ranks` ranks made of it [ranks, rows, hidden], and a bias if there is
// one.
extern "C" int megakv_add(const Layer* layer, int64_t rows, const void* middle, const void* parts, int64_t ranks,
                          const void* bias, void* out) {
  return layered(*layer, [&](auto like) {
    typedef decltype(like) T;
    add_parts(*layer, rows, (const T*)parts, ranks, bias, (const T*)middle, (T*)out);
  });
}

// out [rows, hidden] = the layer's first norm, or the one `behind` attention, of hidden states x [rows, hidden]; with
// `added` [rows, hidden] where that is given, whose sum is `middle`. `out` and `added` are float32 if they are `wide`, else
// of the layer's type.
extern "C" int megakv_normed(const Layer* layer, int behind, int64_t rows, const void* x, const void* added, int wide,
                             int threads, void* middle, void* out) {
  return layered(*layer, [&](auto like) {
    typedef decltype(like) T;
    if (wide)
      normed(*layer, behind, rows, (const T*)x, (const float*)added, threads, (T*)middle, (float*)out);
    else
      normed(*layer, behind, rows, (const T*)x, (const T*)added, threads, (T*)middle, (T*)out);
  });
}

// gate [rows, width] becomes act(gate) * up, of float32 if they are `wide`, else of the layer's type.
extern "C" int megakv_gated(const Layer* layer, int64_t rows, int64_t width, void* gate, const void* up, int wide,
                            int threads) {
  return typed(wide ? 0 : layer->type, [&](auto like) {
    typedef decltype(like) P;
    gated_rows(*layer, rows, width, (P*)gate, (const P*)up, threads);
  });
}
