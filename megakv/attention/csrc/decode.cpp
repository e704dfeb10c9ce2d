// Attention of a few query rows over many keys, for processors: each row of keys and values is read once.
//
// Decoding does few operations per byte, so memory is the limit, if nothing else is. Keys and values therefore stay in
// their type until they are in registers, the query heads that share a KV head use them while they are there, and what
// comes next is fetched meanwhile. Keys are split into chunks over threads, each with a running maximum, sum and output
// (the online softmax), which are merged at the end.
//
// Vectors are the compiler's own (GCC, Clang), so one text serves all processors.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#ifdef __AVX512F__
#define LANES 16
#define BLOCK_ROWS 4
#elif defined(__AVX__)
#define LANES 8
#define BLOCK_ROWS 2
#else
#define LANES 4
#define BLOCK_ROWS 4
#endif
#ifdef __F16C__
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
typedef int32_t FourInts __attribute__((vector_size(16)));
typedef float Four __attribute__((vector_size(16)));

struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

// Keys that are attended to between two looks at the maximum; a multiple of LANES.
constexpr int TILE = 64;
// Keys whose weighted values are summed up in one running sum: more would cost digits.
constexpr int64_t CHUNK = 8192;
// Vectors of columns of the output that are in registers at a time.
constexpr int COLUMNS = 4;
// Multiplications that are not worth a second thread.
constexpr int64_t LEAST_WORK = 1 << 16;

inline Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Words widened(const uint16_t* from) {
  Halves bits;
  std::memcpy(&bits, from, sizeof bits);
  return __builtin_convertvector(bits, Words);
}

inline Floats load(const BFloat16* from) { return (Floats)(widened(&from->bits) << 16); }

inline Floats load(const Float16* from) {
#if defined(__F16C__) && LANES == 16
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__) && LANES == 8
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  const Words bits = widened(&from->bits), exponent = bits & 0x7c00;
  // The exponent's bias differs by 112: a product of powers of two is exact, for subnormal numbers too.
  Words value = (Words)((Floats)((bits & 0x7fff) << 13) * 0x1p112f);
  value |= (Words)(exponent == 0x7c00) & 0x7f800000;
  return (Floats)(value | (bits & 0x8000) << 16);
#endif
}

template <class T> inline float scalar(const T* from) {
  T lanes[LANES] = {*from};
  return load(lanes)[0];
}

inline Floats all(float value) { return value - Floats{}; }

inline Floats exponential(Floats x) {
  // 2^n times a polynomial on [-ln(2)/2, ln(2)/2], within 1e-7 of the true value; 0 below the smallest normal number.
  const Floats rounding = all(12582912.0f);  // 1.5 * 2^23: what is added to it loses its fraction
  const Floats n = (x * 1.44269504088896341f + rounding) - rounding;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  const Ints tiny = x < -87.0f;
  return (Floats)(~tiny & (Ints)(p * (Floats)power));
}

template <class V> inline auto halved(V value) {
  typedef float Half __attribute__((vector_size(sizeof(V) / 2)));
  Half halves[2];
  std::memcpy(halves, &value, sizeof value);
  return halves[0] + halves[1];
}

inline Four folded(Floats value) {
#if LANES == 16
  return halved(halved(value));
#elif LANES == 8
  return halved(value);
#else
  return value;
#endif
}

#ifdef __clang__
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, FourInts{__VA_ARGS__})
#endif

// The sums of four vectors.
inline Four sums(Floats a, Floats b, Floats c, Floats d) {
  const Four e = folded(a), f = folded(b), g = folded(c), h = folded(d);
  const Four ef = SHUFFLED(e, f, 0, 4, 2, 6) + SHUFFLED(e, f, 1, 5, 3, 7);
  const Four gh = SHUFFLED(g, h, 0, 4, 2, 6) + SHUFFLED(g, h, 1, 5, 3, 7);
  return SHUFFLED(ef, gh, 0, 1, 4, 5) + SHUFFLED(ef, gh, 2, 3, 6, 7);
}

// Begins to bring the cache line that these lanes begin in: to the second level, the first one is too small for a tile.
// Spread over the computation, because a processor waits when too many lines are under way.
template <class T> inline void fetch(const T* lanes, int first) {
  if (first * sizeof(T) % 64 == 0) __builtin_prefetch(lanes, 0, 2);
}

// Keys or values: rows of `dim` elements, `step` apart.
template <class T> struct Rows {
  const T* first;
  int64_t step;
  int dim;
  const T* operator[](int row) const { return first + row * step; }
};

// scores[r][j] = q[r] . k[j] for R query rows; meanwhile fetches the rows from `next` on.
template <class T, int R>
void score(const float* q, int q_step, Rows<T> k, int count, float* scores, const T* next) {
  const int whole = k.dim / LANES * LANES;
  for (int j = 0; j < count; j += 4) {
    // Beyond the last key the last one is taken again.
    const T* key[4];
    for (int i = 0; i < 4; ++i) {
      const int row = std::min(j + i, count - 1);
      key[i] = k[row];
    }
    Floats sum[R][4] = {};
    for (int d = 0; d < whole; d += LANES) {
      const Floats a = load(key[0] + d), b = load(key[1] + d), c = load(key[2] + d), e = load(key[3] + d);
      if (next)
        for (int i = 0; i < 4; ++i) fetch(key[i] + (next - k.first) + d, d);
      for (int r = 0; r < R; ++r) {
        const Floats query = load(q + r * q_step + d);
        sum[r][0] += query * a;
        sum[r][1] += query * b;
        sum[r][2] += query * c;
        sum[r][3] += query * e;
      }
    }
    for (int r = 0; r < R; ++r) {
      Four total = sums(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
      for (int d = whole; d < k.dim; ++d) {
        const float query = q[r * q_step + d];
        total += query * Four{scalar(key[0] + d), scalar(key[1] + d), scalar(key[2] + d), scalar(key[3] + d)};
      }
      std::memcpy(scores + r * TILE + j, &total, sizeof total);
    }
  }
}

// out[r][c] = keep[r] * out[r][c] + sum over j of weights[r][j] * v[j][c] for R query rows and C vectors of columns.
template <class T, int R, int C>
void accumulate(const float* weights, const float* keep, Rows<T> v, int column, int count, float* out,
                const T* next) {
  Floats sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = load(out + r * v.dim + column + c * LANES) * keep[r];
  for (int j = 0; j < count; ++j) {
    Floats value[C];
    for (int c = 0; c < C; ++c) value[c] = load(v[j] + column + c * LANES);
    if (next)
      for (int c = 0; c < C; ++c) fetch(next + j * v.step + column + c * LANES, column + c * LANES);
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) sum[r][c] += weights[r * TILE + j] * value[c];
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) std::memcpy(out + r * v.dim + column + c * LANES, &sum[r][c], sizeof(Floats));
}

// The online softmax of some query rows: what they have seen so far.
struct State {
  float* out;
  float* top;
  float* total;
};

template <class T, int R>
void attend(const float* q, int q_step, Rows<T> k, Rows<T> v, int count, State state, const T* next_k, const T* next_v) {
  alignas(64) float weights[R * TILE];
  float keep[R];
  score<T, R>(q, q_step, k, count, weights, next_k);
  for (int r = 0; r < R; ++r) {
    float* row = weights + r * TILE;
    const int padded = (count + LANES - 1) / LANES * LANES;
    for (int j = count; j < padded; ++j) row[j] = -std::numeric_limits<float>::infinity();
    Floats most = load(row);
    for (int j = LANES; j < padded; j += LANES) {
      const Floats each = load(row + j);
      most = each > most ? each : most;
    }
    float top = state.top[r];
    for (int i = 0; i < LANES; ++i) top = std::max(top, most[i]);
    Floats total = {};
    for (int j = 0; j < padded; j += LANES) {
      const Floats weight = exponential(load(row + j) - top);
      total += weight;
      std::memcpy(row + j, &weight, sizeof weight);
    }
    const Four four = folded(total);
    keep[r] = std::exp(state.top[r] - top);
    state.total[r] = state.total[r] * keep[r] + (four[0] + four[1] + four[2] + four[3]);
    state.top[r] = top;
  }
  int column = 0;
  for (; column + COLUMNS * LANES <= v.dim; column += COLUMNS * LANES)
    accumulate<T, R, COLUMNS>(weights, keep, v, column, count, state.out, next_v);
  for (; column + LANES <= v.dim; column += LANES) accumulate<T, R, 1>(weights, keep, v, column, count, state.out, next_v);
  for (; column < v.dim; ++column)
    for (int r = 0; r < R; ++r) {
      float sum = state.out[r * v.dim + column] * keep[r];
      for (int j = 0; j < count; ++j) sum += weights[r * TILE + j] * scalar(v[j] + column);
      state.out[r * v.dim + column] = sum;
    }
}

struct Shape {
  int64_t kv_heads, rows, keys;  // query rows of a KV head
  int key_dim, value_dim;
  int64_t k_head, k_step, v_head, v_step;
};

struct Range {
  int64_t begin, end;
};

// Some heads over some keys, tile by tile: in memory, heads may lie side by side within a token.
template <class T>
void attend_chunk(const float* q, const T* k, const T* v, const Shape& s, Range heads, Range seen, State state) {
  for (int64_t first = seen.begin; first < seen.end; first += TILE) {
    const int count = (int)std::min<int64_t>(TILE, seen.end - first);
    for (int64_t head = heads.begin; head < heads.end; ++head) {
      const Rows<T> keys{k + head * s.k_head + first * s.k_step, s.k_step, s.key_dim};
      const Rows<T> values{v + head * s.v_head + first * s.v_step, s.v_step, s.value_dim};
      // What comes after this: the next head's rows, or after the last head the first one's next tile.
      const bool last = head + 1 == heads.end;
      const T* next_k = last ? k + heads.begin * s.k_head + (first + TILE) * s.k_step : keys.first + s.k_head;
      const T* next_v = last ? v + heads.begin * s.v_head + (first + TILE) * s.v_step : values.first + s.v_head;
      if (last && first + TILE >= seen.end) next_k = next_v = nullptr;
      for (int64_t row = 0; row < s.rows;) {
        const int64_t index = head * s.rows + row, left = s.rows - row;
        const State own{state.out + index * s.value_dim, state.top + index, state.total + index};
        const float* query = q + index * s.key_dim;
        const T* fetch_k = row ? nullptr : next_k;
        const T* fetch_v = row ? nullptr : next_v;
        if (left >= BLOCK_ROWS) {
          attend<T, BLOCK_ROWS>(query, s.key_dim, keys, values, count, own, fetch_k, fetch_v);
          row += BLOCK_ROWS;
        } else if (left >= 2) {
          attend<T, 2>(query, s.key_dim, keys, values, count, own, fetch_k, fetch_v);
          row += 2;
        } else {
          attend<T, 1>(query, s.key_dim, keys, values, count, own, fetch_k, fetch_v);
          row += 1;
        }
      }
    }
  }
}

inline Range part(int64_t whole, int64_t index, int64_t parts) {
  return {whole * index / parts, whole * (index + 1) / parts};
}

template <class T>
void decode(const float* q, const void* k, const void* v, const Shape& s, float scale, int threads, float* out,
            float* lse) {
  const int64_t rows = s.kv_heads * s.rows, tiles = (s.keys + TILE - 1) / TILE;
  const int64_t work = rows * s.keys * (s.key_dim + s.value_dim);
  const int64_t workers = work < LEAST_WORK ? 1 : threads, per_round = workers * CHUNK;
  const int64_t chunks = std::min(tiles, workers * ((s.keys + per_round - 1) / per_round));
  const int64_t head_parts = std::min(s.kv_heads, (workers + chunks - 1) / chunks);
  std::vector<float> scaled(rows * s.key_dim), totals(chunks * rows);
  std::vector<float> tops(chunks * rows, -std::numeric_limits<float>::infinity());
  std::vector<float> others((chunks - 1) * rows * s.value_dim);
  for (size_t i = 0; i < scaled.size(); ++i) scaled[i] = q[i] * scale;
  // The first chunk's outputs lie where the results will.
  const auto outputs = [&](int64_t chunk) {
    return chunk ? others.data() + (chunk - 1) * rows * s.value_dim : out;
  };
  std::fill(out, out + rows * s.value_dim, 0.0f);
#pragma omp parallel for num_threads(workers) schedule(static, 1)
  for (int64_t index = 0; index < chunks * head_parts; ++index) {
    const int64_t chunk = index % chunks;
    const Range heads = part(s.kv_heads, index / chunks, head_parts), own = part(tiles, chunk, chunks);
    const State state{outputs(chunk), &tops[chunk * rows], &totals[chunk * rows]};
    attend_chunk(scaled.data(), (const T*)k, (const T*)v, s, heads,
                 {own.begin * TILE, std::min(s.keys, own.end * TILE)}, state);
  }
  for (int64_t row = 0; row < rows; ++row) {
    float top = tops[row], total = 0;
    for (int64_t chunk = 1; chunk < chunks; ++chunk) top = std::max(top, tops[chunk * rows + row]);
    float* target = out + row * s.value_dim;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      const float share = std::exp(tops[chunk * rows + row] - top);
      const float* source = outputs(chunk) + row * s.value_dim;
      total += share * totals[chunk * rows + row];
      for (int i = 0; i < s.value_dim; ++i) target[i] = (chunk ? target[i] : 0) + share * source[i];
    }
    for (int i = 0; i < s.value_dim; ++i) target[i] /= total;
    lse[row] = top + std::log(total);
  }
}

}  // namespace

// q [kv_heads, rows, key_dim] and the results [kv_heads, rows, value_dim] and [kv_heads, rows] are float32 and
// contiguous; k and v have the type (0 float32, 1 bfloat16, 2 float16) and strides, in elements, of heads and keys.
// Returns 0, or 1 if there is no memory for partial results.
extern "C" int megakv_decode(int type, const float* q, const void* k, const void* v, int64_t kv_heads, int64_t rows,
                             int64_t keys, int64_t key_dim, int64_t value_dim, int64_t k_head, int64_t k_step,
                             int64_t v_head, int64_t v_step, float scale, int threads, float* out, float* lse) {
  const Shape shape{kv_heads, rows, keys, (int)key_dim, (int)value_dim, k_head, k_step, v_head, v_step};
  try {
    if (type == 0) decode<float>(q, k, v, shape, scale, threads, out, lse);
    if (type == 1) decode<BFloat16>(q, k, v, shape, scale, threads, out, lse);
    if (type == 2) decode<Float16>(q, k, v, shape, scale, threads, out, lse);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}
