// Attention of many tokens. Included by one file of each instruction set inside its own namespace, which has a `Vector`.
//
// Blocks of keys are turned into float32 once, keys side by side, and serve all rows of the task. Softmax goes along with
// the running maximum and sum of each row (Milakov and Gimelshein, arXiv:1805.02867).

constexpr float kNone = -3.0e38f;  // score of a key that is not there or not seen

inline __m256 load8(FloatType type, const void* p, int64_t at) {
  if (type == FloatType::kFloat32) return _mm256_loadu_ps(static_cast<const float*>(p) + at);
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(p) + at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline void transpose8(__m256 (&r)[8]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

// dst[d][key] of `count` keys from `k` on; the rest of the block is 0.
void load_keys(const AttentionArgs& a, int64_t from, int count, float* dst) {
  for (int key = 0; key < kAttentionKeys; key += 8) {
    for (int d = 0; d < a.head_dim; d += 8) {
      __m256 r[8];
      for (int i = 0; i < 8; ++i) {
        r[i] = key + i < count ? load8(a.type, a.k.data, from + (key + i) * a.k.stride[2] + d) : _mm256_setzero_ps();
      }
      transpose8(r);
      for (int i = 0; i < 8; ++i) _mm256_store_ps(dst + (d + i) * kAttentionKeys + key, r[i]);
    }
  }
}

// out[R][2 vectors] (stride kAttentionKeys or value_dim) = or += left[R][n] * right[n][2 vectors].
template <int R, bool kAdd>
INT4MOE_INLINE void product(const float* left, int64_t left_stride, const float* right, int64_t right_stride, int n,
                            float* out, int64_t out_stride) {
  constexpr int L = Vector::kLanes;
  Vector::Type acc[R][2];
  INT4MOE_UNROLL
  for (int r = 0; r < R; ++r) {
    acc[r][0] = kAdd ? Vector::load(out + r * out_stride) : Vector::zero();
    acc[r][1] = kAdd ? Vector::load(out + r * out_stride + L) : Vector::zero();
  }
  for (int i = 0; i < n; ++i, right += right_stride) {
    const Vector::Type low = Vector::load(right), high = Vector::load(right + L);
    INT4MOE_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vector::Type l = Vector::set1(left[r * left_stride + i]);
      acc[r][0] = Vector::fma(l, low, acc[r][0]);
      acc[r][1] = Vector::fma(l, high, acc[r][1]);
    }
  }
  INT4MOE_UNROLL
  for (int r = 0; r < R; ++r) {
    Vector::store(out + r * out_stride, acc[r][0]);
    Vector::store(out + r * out_stride + L, acc[r][1]);
  }
}

template <bool kAdd, int... R>
void products(std::integer_sequence<int, R...>, int rows, int columns, const float* left, int64_t left_stride,
              const float* right, int64_t right_stride, int n, float* out, int64_t out_stride) {
  using Fn = void (*)(const float*, int64_t, const float*, int64_t, int, float*, int64_t);
  static constexpr Fn kBySize[] = {product<R + 1, kAdd>...};
  constexpr int kMost = int(sizeof...(R));
  const int tiles = (rows + kMost - 1) / kMost;  // of even size: a small one would wait for its own sums
  for (int i = 0, r = 0; i < tiles; ++i) {
    const int size = rows * (i + 1) / tiles - r;
    for (int c = 0; c < columns; c += 2 * Vector::kLanes) {
      kBySize[size - 1](left + r * left_stride, left_stride, right + c, right_stride, n, out + r * out_stride + c, out_stride);
    }
    r += size;
  }
}

using RowTiles = std::make_integer_sequence<int, Vector::kRowTile>;

// scores of one row become weights relative to the greatest so far; returns the factor for what was summed before.
float softmax_block(float* scores, int visible, float& most, float& sum) {
  constexpr int L = Vector::kLanes;
  for (int i = visible; i < kAttentionKeys; ++i) scores[i] = kNone;
  Vector::Type m = Vector::set1(most);
  for (int i = 0; i < kAttentionKeys; i += L) m = Vector::max(Vector::load(scores + i), m);
  const float top = Vector::max_lanes(m);
  const Vector::Type t = Vector::set1(top);
  Vector::Type total = Vector::zero();
  for (int i = 0; i < kAttentionKeys; i += L) {
    const Vector::Type s = Vector::load(scores + i);
    const Vector::Type e = Vector::zero_where_equal(Vector::exp(Vector::sub(s, t)), s, kNone);
    total = Vector::add(total, e);
    Vector::store(scores + i, e);
  }
  const float factor = most == kNone ? 0.0f : Vector::first(Vector::exp(Vector::set1(most - top)));
  sum = sum * factor + Vector::sum_lanes(total);
  most = top;
  return factor;
}

void attend(const AttentionArgs& a, int64_t batch, int kv_head, int64_t first, int64_t last, float* scratch) {
  const int group = a.heads / a.kv_heads, rows = int(last - first) * group;
  const int d = a.head_dim, dv = a.value_dim;
  float* keys = scratch;                         // [head_dim][kAttentionKeys]
  float* values = keys + kAttentionKeys * d;     // [kAttentionKeys][value_dim]
  float* scores = values + kAttentionKeys * dv;  // [rows][kAttentionKeys]
  float* out = scores + rows * kAttentionKeys;   // [rows][value_dim]
  float* query = out + int64_t(rows) * dv;       // [rows][head_dim]
  float *most = query + int64_t(rows) * d, *sum = most + rows;

  // Row r is token first + r / group, head kv_head * group + r % group.
  const __m256 scale = _mm256_set1_ps(a.scale);
  for (int r = 0; r < rows; ++r) {
    const int64_t head = kv_head * group + r % group, token = first + r / group;
    const int64_t at = batch * a.q.stride[0] + head * a.q.stride[1] + token * a.q.stride[2];
    for (int i = 0; i < d; i += 8) _mm256_store_ps(query + r * d + i, _mm256_mul_ps(load8(a.type, a.q.data, at + i), scale));
    for (int i = 0; i < dv; i += 8) _mm256_store_ps(out + r * dv + i, _mm256_setzero_ps());
    most[r] = kNone;
    sum[r] = 0;
  }

  const int64_t before = a.keys - a.tokens;
  const int64_t seen = before + last;  // by the last token of the task
  for (int64_t from = 0; from < seen; from += kAttentionKeys) {
    const int count = int(seen - from < kAttentionKeys ? seen - from : kAttentionKeys);
    load_keys(a, batch * a.k.stride[0] + kv_head * a.k.stride[1] + from * a.k.stride[2], count, keys);
    const int64_t v = batch * a.v.stride[0] + kv_head * a.v.stride[1] + from * a.v.stride[2];
    for (int key = 0; key < count; ++key) {
      const int64_t at = v + key * a.v.stride[2];
      for (int i = 0; i < dv; i += 8) _mm256_store_ps(values + key * dv + i, load8(a.type, a.v.data, at + i));
    }
    products<false>(RowTiles(), rows, kAttentionKeys, query, d, keys, kAttentionKeys, d, scores, kAttentionKeys);
    for (int r = 0; r < rows; ++r) {
      const int64_t visible = before + first + r / group + 1 - from;
      const int limit = int(visible < 0 ? 0 : visible < count ? visible : count);
      const float factor = softmax_block(scores + r * kAttentionKeys, limit, most[r], sum[r]);
      if (factor == 1.0f) continue;
      const __m256 f = _mm256_set1_ps(factor);
      for (int i = 0; i < dv; i += 8) _mm256_store_ps(out + r * dv + i, _mm256_mul_ps(f, _mm256_load_ps(out + r * dv + i)));
    }
    products<true>(RowTiles(), rows, dv, scores, kAttentionKeys, values, dv, count, out, dv);
  }

  const size_t size = a.type == FloatType::kFloat32 ? 4 : 2;
  for (int r = 0; r < rows; ++r) {
    const __m256 inverse = _mm256_set1_ps(1.0f / sum[r]);
    for (int i = 0; i < dv; i += 8) _mm256_store_ps(out + r * dv + i, _mm256_mul_ps(inverse, _mm256_load_ps(out + r * dv + i)));
    const int64_t at = ((batch * a.tokens + first + r / group) * a.heads + kv_head * group + r % group) * dv;
    store(a.type, out + r * dv, static_cast<char*>(a.out) + size_t(at) * size, size_t(dv));
  }
}
