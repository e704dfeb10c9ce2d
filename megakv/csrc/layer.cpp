// Decoder layers of the Llama kind, for a few rows on processors: see layer.h.
//
// Layers of few tokens take as long as their calls: norms, projections and rotary embeddings are one of them, and what
// comes behind attention is another. Of a step of decoding all layers are one, with all that ranks exchange in them.

#include "channel.h"
#include "layer.h"
#include "spread.h"

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

// Some rows of as many numbers each.
template <class T> Space<T> taken(const Picked& picked, const T* from, int64_t step, int64_t width) {
  Space<T> found(picked.count * width);
  for (int64_t i = 0; i < picked.count; ++i) std::copy_n(from + picked.rows[i] * step, width, &found[i * width]);
  return found;
}

// Of the rows those are computed behind the keys and values that are `picked`; others become zeros.
template <class T>
void token_layer(const Layer& layer, const Ranks& ranks, const Held& held, const Spread* spread, const Picked& picked,
                 int64_t rows, const T* x, const T* cos, const T* sin, float scale, int threads, T* out,
                 Moments& moments) {
  const int64_t dim = layer.head_dim, width = layer.heads * dim, columns = layer.columns();
  const int64_t hidden = layer.hidden;
  Space<T> packed(rows * columns), attended(rows * width);
  if (ranks.inputs)
    project_together(layer, ranks, rows, x, threads, columns, packed.data(), moments);
  else
    project(layer, rows, x, threads, packed.data());
  rotate_all(layer, rows, cos, sin, threads, packed.data());

  const auto heads = [&](int64_t first) { return Heads{&packed[first], dim, columns}; };
  Step step{layer.pairs, rows, layer.heads, layer.kv_heads, dim, dim, heads(0), heads(width),
            heads(width + layer.kv_heads * dim)};
  Space<T> queries(0), chosen(0);
  if (picked.rows) {
    queries = taken(picked, packed.data(), columns, width), chosen = taken(picked, x, hidden, hidden);
    step.q = {queries.data(), dim, width}, x = chosen.data();
  }
  const auto attend = [&](const Seen& seen, auto runs_of, bool partial, void* to) {
    attend_rows<T>(step, picked.rows ? seen.of(picked) : seen, runs_of, scale, nullptr, partial, threads, to);
  };
  const auto here = [&](int64_t sequence) { return held.of(sequence); };
  if (spread) {
    Channel& channel = *ranks.attention;
    int64_t most = 0;
    for (int64_t rank = 0; rank < channel.ranks; ++rank) most = std::max(most, spread->total(rank));
    Space<T> own(most * 2 * layer.kv_heads * dim);
    Seen seen = append_all<T>(step, held);
    pack_rows<T>(step, held, *spread, channel.own, own.data());
    const Space<T> all = moments.gathered(PARTIAL, channel, own);
    const auto runs = unpacked<T>(step, *spread, channel.ranks, all.data(), own.size());
    seen.low.assign(spread->low, spread->low + rows), seen.high.assign(spread->high, spread->high + rows);
    const auto everywhere = [&](int64_t i) { return Runs{runs[i].data(), runs[i].data() + runs[i].size()}; };
    moments.of(ATTENTION, [&] { attend(seen, everywhere, false, attended.data()); });
  } else if (ranks.attention) {
    Space<float> own(rows * layer.heads * (dim + 1));
    moments.of(ATTENTION, [&] { attend(append_all<T>(step, held), here, true, own.data()); });
    const Space<float> all = moments.gathered(PARTIAL, *ranks.attention, own);
    merge_parts(all.data(), ranks.attention->ranks, rows * layer.heads, layer.heads, dim, nullptr, attended.data());
  } else {
    moments.of(ATTENTION, [&] { attend(append_all<T>(step, held), here, false, attended.data()); });
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

  const bool alone = !ranks.feed_forward && !picked.rows;
  const int64_t count = picked.rows ? picked.count : rows;
  Space<T> middle(count * hidden), own(alone ? 0 : count * hidden);
  feed_forward(layer, count, x, attended.data(), ranks.outputs, !ranks.feed_forward, threads, middle.data(),
               alone ? out : own.data());
  if (picked.rows) {
    std::fill_n(out, rows * hidden, T{});
    for (int64_t i = 0; i < count; ++i) std::copy_n(&own[i * hidden], hidden, out + picked.rows[i] * hidden);
  } else if (ranks.feed_forward) {
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
  void check(const Layer& first, const Held& held, const Spread* spread, bool picks, int64_t rows) const {
    layer->check();
    ranks->check(*layer);
    held.check(rows, layer->kv_heads, layer->head_dim, layer->head_dim);
    // What ranks sum is all rows'.
    require(!(spread || picks) || !(ranks->inputs || ranks->outputs || ranks->feed_forward), Fault::RANKS);
    require(spread ? (bool)ranks->attention : !(picks && ranks->attention), Fault::RANKS);
    if (spread) spread->check(held, *ranks->attention, rows);
    const bool alike = layer->type == first.type && layer->hidden == first.hidden && layer->head_dim == first.head_dim;
    require(alike, Fault::WEIGHTS);
  }
};

// `count` whole layers of `given` ones, one behind the other, of a few rows of each sequence: out [rows, hidden] of
// x [rows, hidden], with rotary embeddings [rows, head_dim]. Of the last of them those rows alone may be `picked` whose
// results are asked for. Where rows are `spread` over ranks, each sends all others its keys and values of every layer, by
// the channel for attention. `at` [given, 5, 2] is written where something took place. Returns how it ended: see `Fault`.
extern "C" int megakv_token_layers(const TokenLayer* layers, int64_t given, const Held* held, const Spread* spread,
                                   const int64_t* picked_rows, int64_t picked_count, int64_t count, int64_t rows,
                                   const void* x, const void* cos, const void* sin, int threads, void* out, double* at) {
  const double begun = now();
  return typed(layers->layer->type, [&](auto like) {
    typedef decltype(like) T;
    require(count <= given && threads > 0, Fault::SIZES);
    const Picked picked{picked_rows, picked_count}, all{};
    picked.check(rows);
    for (int64_t i = 0; i < count; ++i)
      layers[i].check(*layers->layer, held[i], spread, picked_rows && i + 1 == count, rows);
    // By turns: a layer's results are the next one's hidden states.
    Space<T> turns[2]{Space<T>(0), Space<T>(0)};
    const T* from = (const T*)x;
    for (int64_t i = 0; i < count; ++i) {
      Space<T>& own = turns[i % 2];
      if (i + 1 < count && !own.size()) own = Space<T>(rows * layers[i].layer->hidden);
      T* const to = i + 1 < count ? own.data() : (T*)out;
      Moments moments(at + 2 * PARTS * i, begun);
      token_layer(*layers[i].layer, *layers[i].ranks, held[i], spread, i + 1 < count ? all : picked, rows, from,
                  (const T*)cos, (const T*)sin, (float)layers[i].scale, threads, to, moments);
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
