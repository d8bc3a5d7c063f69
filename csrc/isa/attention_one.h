// Attention of a single token. Included by one file of each instruction set inside its own namespace, which has a `Vector`,
// after attention_rows.h.
//
// Each key and value is used once by each of a few heads: they are widened in registers and never stored. A vector of scores
// has kPadded<R> lanes for each of its keys, a head in each, so that softmax needs no sums across lanes until its end. Runs of
// keys, which threads share, are joined as softmax joins blocks.

template <int R>
constexpr int kPadded = R > 4 ? 8 : R > 2 ? 4 : R;

// Elements that are turned into two vectors at once, of bfloat16 the even and the odd ones.
constexpr int kPair = 2 * Vector::kLanes;

struct Max {
  Vector::Type operator()(Vector::Type a, Vector::Type b) const { return Vector::max(a, b); }
};
struct Sum {
  Vector::Type operator()(Vector::Type a, Vector::Type b) const { return Vector::add(a, b); }
};

template <FloatType T>
constexpr int64_t kBytes = T == FloatType::kFloat32 ? 4 : 2;

// Keys and values of one key/value head, from the first of a block on.
struct Block {
  const void *keys, *values;
  int64_t key_stride, value_stride;  // in elements
  int count, head_dim, value_dim;
  int64_t ahead;  // bytes to the keys of the next block, or 0
};

// Also fetches the block's values and the next block's keys, one line for each that is read.
// scores[key][kPadded<R>] = query[head_dim / kPair][R][kPair] . keys
template <FloatType T, int R>
void score(const Block& b, const float* query, float* scores) {
  constexpr int L = Vector::kLanes, P = kPadded<R>, K = L / P;
  for (int key = 0; key < b.count; key += K) {
    Vector::Type acc[L];
    const char *key_at[K], *value_at[K];
    INT4MOE_UNROLL
    for (int i = 0; i < L; ++i) acc[i] = Vector::zero();
    INT4MOE_UNROLL
    for (int k = 0; k < K; ++k) {
      const int64_t from = key + k < b.count ? key + k : b.count - 1;
      key_at[k] = static_cast<const char*>(b.keys) + from * b.key_stride * kBytes<T>;
      value_at[k] = static_cast<const char*>(b.values) + from * b.value_stride * kBytes<T>;
    }
    const float* q = query;
    for (int d = 0; d < b.head_dim; d += kPair, q += kPair * R) {
      INT4MOE_UNROLL
      for (int k = 0; k < K; ++k) {
        const auto x = Vector::pair<T>(key_at[k], d);
        _mm_prefetch(key_at[k] + d * kBytes<T> + b.ahead, _MM_HINT_T1);
        _mm_prefetch(value_at[k] + d * kBytes<T>, _MM_HINT_T1);
        INT4MOE_UNROLL
        for (int r = 0; r < R; ++r) acc[k * P + r] = Vector::fma(Vector::load(q + kPair * r), x.first, acc[k * P + r]);
        INT4MOE_UNROLL
        for (int r = 0; r < R; ++r) acc[k * P + r] = Vector::fma(Vector::load(q + kPair * r + L), x.second, acc[k * P + r]);
      }
    }
    Vector::store(scores + key * P, Vector::sums_of_lanes(acc));
  }
  for (int i = b.count * P; i < (b.count + K - 1) / K * L; ++i) scores[i] = kNone;
}

// Scores become weights relative to the greatest so far; returns the factor for what was summed before. Lanes of `most`
// are heads, those of `sum` heads and keys.
template <int R>
Vector::Type softmax(float* scores, int count, Vector::Type& most, Vector::Type& sum) {
  constexpr int L = Vector::kLanes;
  const int floats = (count * kPadded<R> + L - 1) / L * L;
  Vector::Type top = most;
  for (int i = 0; i < floats; i += L) top = Vector::max(Vector::load(scores + i), top);  // keeps top where one is NaN
  top = Vector::every<kPadded<R>>(top, Max());
  const Vector::Type factor = Vector::zero_where_equal(Vector::exp(Vector::sub(most, top)), most, kNone);
  Vector::Type total = Vector::mul(sum, factor);
  for (int i = 0; i < floats; i += L) {
    const Vector::Type s = Vector::load(scores + i);
    const Vector::Type e = Vector::zero_where_equal(Vector::exp(Vector::sub(s, top)), s, kNone);
    total = Vector::add(total, e);
    Vector::store(scores + i, e);
  }
  most = top;
  sum = total;
  return factor;
}

// out[n][value_dim] += weights[key][P] . values, for N heads, columns [from, to), kWide pairs of vectors at a time.
template <FloatType T, int N, int P, int kWide>
void add_columns(const Block& b, const float* weights, int from, int to, float* out) {
  constexpr int L = Vector::kLanes;
  for (int d = from; d < to; d += kPair * kWide) {
    Vector::Type acc[N][kWide][2];
    INT4MOE_UNROLL
    for (int r = 0; r < N; ++r) {
      INT4MOE_UNROLL
      for (int w = 0; w < kWide; ++w) {
        acc[r][w][0] = Vector::load(out + r * b.value_dim + d + kPair * w);
        acc[r][w][1] = Vector::load(out + r * b.value_dim + d + kPair * w + L);
      }
    }
    const float* p = weights;
    for (int64_t key = 0, at = d; key < b.count; ++key, p += P, at += b.value_stride) {
      INT4MOE_UNROLL
      for (int w = 0; w < kWide; ++w) {
        const auto x = Vector::pair<T>(b.values, at + kPair * w);
        INT4MOE_UNROLL
        for (int r = 0; r < N; ++r) {
          const Vector::Type weight = Vector::set1(p[r]);
          acc[r][w][0] = Vector::fma(weight, x.first, acc[r][w][0]);
          acc[r][w][1] = Vector::fma(weight, x.second, acc[r][w][1]);
        }
      }
    }
    INT4MOE_UNROLL
    for (int r = 0; r < N; ++r) {
      INT4MOE_UNROLL
      for (int w = 0; w < kWide; ++w) {
        Vector::store(out + r * b.value_dim + d + kPair * w, acc[r][w][0]);
        Vector::store(out + r * b.value_dim + d + kPair * w + L, acc[r][w][1]);
      }
    }
  }
}

// At least eight sums, so that they do not wait for each other.
template <FloatType T, int N, int P>
void add_values(const Block& b, const float* weights, float* out) {
  constexpr int kWide = N == 1 ? 4 : N < 4 ? 2 : 1;
  const int wide = b.value_dim / (kPair * kWide) * (kPair * kWide);
  add_columns<T, N, P, kWide>(b, weights, 0, wide, out);
  if constexpr (kWide > 1) add_columns<T, N, P, 1>(b, weights, wide, b.value_dim, out);
}

// R heads, whose first query begins at element `q_at`, over `count` keys.
template <FloatType T, int R>
void run_heads(const AttentionArgs& a, int64_t q_at, Block b, int64_t count, float* out, float* stats, float* scratch) {
  constexpr int L = Vector::kLanes, P = kPadded<R>, kSplit = R > Vector::kRowTile ? R / 2 : R;
  float *scores = scratch, *query = scratch + kAttentionKeys * kAttentionHeads;
  const Vector::Type scale = Vector::set1(a.scale);
  for (int r = 0; r < R; ++r) {
    for (int d = 0; d < a.head_dim; d += kPair) {
      const auto x = Vector::pair<T>(a.q.data, q_at + r * a.q.stride[1] + d);
      float* to = query + d * R + kPair * r;
      Vector::store(to, Vector::mul(x.first, scale));
      Vector::store(to + L, Vector::mul(x.second, scale));
    }
  }
  std::fill(out, out + R * a.value_dim, 0.0f);
  Vector::Type most = Vector::set1(kNone), sum = Vector::zero();
  for (; count > 0; count -= kAttentionKeys) {
    b.count = int(count < kAttentionKeys ? count : kAttentionKeys);
    b.ahead = count > kAttentionKeys ? b.key_stride * kAttentionKeys * kBytes<T> : 0;
    score<T, R>(b, query, scores);
    const Vector::Type factor = softmax<R>(scores, b.count, most, sum);
    if (!Vector::all_one(factor)) {
      alignas(64) float factors[L];
      Vector::store(factors, factor);
      for (int r = 0; r < R; ++r) {
        const Vector::Type f = Vector::set1(factors[r]);
        for (float* x = out + r * a.value_dim; x < out + (r + 1) * a.value_dim; x += L) {
          Vector::store(x, Vector::mul(f, Vector::load(x)));
        }
      }
    }
    add_values<T, kSplit, P>(b, scores, out);
    if constexpr (kSplit < R) add_values<T, R - kSplit, P>(b, scores + kSplit, out + kSplit * a.value_dim);
    b.keys = static_cast<const char*>(b.keys) + b.key_stride * kAttentionKeys * kBytes<T>;
    b.values = static_cast<const char*>(b.values) + b.value_stride * kAttentionKeys * kBytes<T>;
  }
  Vector::store8(stats, most);
  Vector::store8(stats + 8, Vector::every<P>(sum, Sum()));
}

template <FloatType T>
void attend_run_of(const AttentionArgs& a, int64_t batch, int kv_head, int64_t from, int64_t to, float* result,
                   float* scratch) {
  using Fn = void (*)(const AttentionArgs&, int64_t, Block, int64_t, float*, float*, float*);
  constexpr Fn kBySize[] = {run_heads<T, 1>, run_heads<T, 2>, run_heads<T, 3>, run_heads<T, 4>,
                            run_heads<T, 5>, run_heads<T, 6>, run_heads<T, 7>, run_heads<T, 8>};
  static_assert(sizeof(kBySize) / sizeof(Fn) == kAttentionHeads, "a function for each number of heads");
  const auto first = [&](const Heads& h) {
    return static_cast<const char*>(h.data) + (batch * h.stride[0] + kv_head * h.stride[1] + from * h.stride[2]) * kBytes<T>;
  };
  const Block b{first(a.k), first(a.v), a.k.stride[2], a.v.stride[2], 0, a.head_dim, a.value_dim, 0};
  const int group = attention_group(a), tiles = attention_tiles(a);
  float* stats = result + size_t(group) * a.value_dim;
  for (int t = 0; t < tiles; ++t, stats += 2 * kAttentionHeads) {
    const int r = group * t / tiles, end = group * (t + 1) / tiles;
    const int64_t q_at = batch * a.q.stride[0] + (int64_t(kv_head) * group + r) * a.q.stride[1];
    kBySize[end - r - 1](a, q_at, b, to - from, result + size_t(r) * a.value_dim, stats, scratch);
  }
}

template <FloatType T>
void join_runs_of(const AttentionArgs& a, int64_t batch, int kv_head, int64_t runs, const float* results, float* scratch) {
  constexpr int L = Vector::kLanes;
  const int group = attention_group(a), tiles = attention_tiles(a);
  const size_t stride = attention_run_floats(a);
  auto* out = static_cast<char*>(a.out) + (batch * a.heads + int64_t(kv_head) * group) * a.value_dim * kBytes<T>;
  for (int t = 0; t < tiles; ++t) {
    const float* stats = results + size_t(group) * a.value_dim + size_t(t) * 2 * kAttentionHeads;
    Vector::Type most = Vector::load8(stats), sum = Vector::zero();
    for (int64_t i = 1; i < runs; ++i) most = Vector::max(Vector::load8(stats + size_t(i) * stride), most);
    for (int64_t i = 0; i < runs; ++i) {
      const Vector::Type weight = Vector::exp(Vector::sub(Vector::load8(stats + size_t(i) * stride), most));
      sum = Vector::fma(weight, Vector::load8(stats + size_t(i) * stride + 8), sum);
      Vector::store8(scratch + 8 * i, weight);
    }
    alignas(64) float sums[8];
    Vector::store8(sums, sum);
    for (int r = group * t / tiles, lane = 0; r < group * (t + 1) / tiles; ++r, ++lane) {
      const Vector::Type inverse = Vector::set1(1.0f / sums[lane]);
      for (int d = 0; d < a.value_dim; d += kPair) {
        Vector::Type first = Vector::zero(), second = first;
        for (int64_t i = 0; i < runs; ++i) {
          const Vector::Type weight = Vector::set1(scratch[8 * i + lane]);
          const float* from = results + size_t(i) * stride + size_t(r) * a.value_dim + d;
          first = Vector::fma(weight, Vector::load(from), first);
          second = Vector::fma(weight, Vector::load(from + L), second);
        }
        alignas(64) float row[kPair];
        Vector::unpair<T>(row, Vector::mul(first, inverse), Vector::mul(second, inverse));
        store(T, row, out + (int64_t(r) * a.value_dim + d) * kBytes<T>, size_t(kPair));
      }
    }
  }
}

void attend_run(const AttentionArgs& a, int64_t batch, int kv_head, int64_t from, int64_t to, float* result,
                float* scratch) {
  const auto fn = a.type == FloatType::kFloat32 ? attend_run_of<FloatType::kFloat32> : attend_run_of<FloatType::kBFloat16>;
  fn(a, batch, kv_head, from, to, result, scratch);
}

void join_runs(const AttentionArgs& a, int64_t batch, int kv_head, int64_t runs, const float* results, float* scratch) {
  const auto fn = a.type == FloatType::kFloat32 ? join_runs_of<FloatType::kFloat32> : join_runs_of<FloatType::kBFloat16>;
  fn(a, batch, kv_head, runs, results, scratch);
}
