// Attention of a prompt's rows that are spread over ranks: every rank has all keys and values in one message of each, and
// attends to them in the order of their slots. Messages are those of `megakv.attention.ring.KVFormat`.

#pragma once

#include "channel.h"
#include "step.h"

namespace {

// So many rows of a rank's message, of a sequence, from one on.
struct Piece {
  int64_t rank, first, rows;
};

struct Spread {
  int64_t sequences;
  const int64_t* counts;  // [ranks, sequences] rows that each rank sends of each
  int64_t numbers;
  const int64_t* before;  // [sequences] rows before those that this rank sends, of all that it was ever given
  const Piece* pieces;    // of every sequence from bounds on, slots ascending
  int64_t piece_count;
  const int64_t *bounds, *low, *high;  // low and high: keys that each of this rank's rows sees, of all in that order
  int64_t rows;

  void check(const Held& held, const Channel& channel, int64_t own_rows) const {
    require(sequences == held.sequences && numbers == channel.ranks * sequences && rows == own_rows, Fault::SEQUENCES);
    require(divides(bounds, sequences + 1, sequences, piece_count), Fault::SEQUENCES);
    require(*std::min_element(counts, counts + numbers) >= 0, Fault::RANKS);
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
      const int64_t skipped = before[sequence] - held.first[sequence];
      const int64_t own = counts[channel.own * sequences + sequence];
      require(own == 0 || (skipped >= 0 && skipped + own == held.of(sequence).keys()), Fault::RUNS);
      for (int64_t i = bounds[sequence]; i < bounds[sequence + 1]; ++i) {
        const Piece& piece = pieces[i];
        require(piece.rank >= 0 && piece.rank < channel.ranks && piece.first >= 0 && piece.rows >= 0, Fault::RANKS);
        require(piece.rows <= counts[piece.rank * sequences + sequence] - piece.first, Fault::RUNS);
      }
    }
  }

  int64_t total(int64_t rank) const { return std::accumulate(counts + rank * sequences, counts + (rank + 1) * sequences, (int64_t)0); }
};

// This rank's message: of every sequence the keys of each head, then its values.
template <class T> void pack_rows(const Step& s, const Held& held, const Spread& spread, int64_t own, T* to) {
  for (int64_t sequence = 0; sequence < spread.sequences; ++sequence) {
    if (!spread.counts[own * spread.sequences + sequence]) continue;
    std::vector<Run> runs(held.of(sequence).begin(), held.of(sequence).end());
    skip<T>(runs.data(), runs.data() + runs.size(), spread.before[sequence] - held.first[sequence]);
    const auto copy = [&](const void* Run::*rows, int64_t Run::*head_step, int64_t Run::*step, int64_t dim) {
      for (int64_t head = 0; head < s.kv_heads; ++head)
        for (const Run& run : runs) {
          const T* const from = (const T*)(run.*rows) + head * run.*head_step;
          for (int64_t key = 0; key < run.keys; ++key, to += dim) std::memcpy(to, from + key * run.*step, dim * sizeof(T));
        }
    };
    copy(&Run::k, &Run::k_head, &Run::k_step, s.key_dim);
    copy(&Run::v, &Run::v_head, &Run::v_step, s.value_dim);
  }
}

// Where all ranks' rows of every sequence lie in their messages of so many elements.
template <class T>
std::vector<std::vector<Run>> unpacked(const Step& s, const Spread& spread, int64_t ranks, const T* all, int64_t size) {
  std::vector<const T*> begins(spread.numbers);
  const int64_t row = s.kv_heads * (s.key_dim + s.value_dim);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const T* at = all + rank * size;
    for (int64_t i = rank * spread.sequences; i < (rank + 1) * spread.sequences; ++i) {
      begins[i] = at;
      at += spread.counts[i] * row;
    }
  }
  std::vector<std::vector<Run>> found(spread.sequences);
  for (int64_t sequence = 0; sequence < spread.sequences; ++sequence)
    for (int64_t i = spread.bounds[sequence]; i < spread.bounds[sequence + 1]; ++i) {
      const Piece& piece = spread.pieces[i];
      const int64_t from = piece.rank * spread.sequences + sequence, count = spread.counts[from];
      const T* const keys = begins[from] + piece.first * s.key_dim;
      const T* const values = begins[from] + s.kv_heads * count * s.key_dim + piece.first * s.value_dim;
      found[sequence].push_back(
          {keys, values, piece.rows, count * s.key_dim, s.key_dim, count * s.value_dim, s.value_dim, 0, 0});
    }
  return found;
}

}  // namespace
