// Blocks of keys are turned into float32 once, keys side by side, and serve all rows of the task. Softmax goes along with
// the running maximum and sum of each row (Milakov and Gimelshein, arXiv:1805.02867).
#include "isa/avx2_attention.h"

#include <cstdlib>

#pragma GCC diagnostic ignored "-Wunused-function"
#include "isa/avx2_common.h"

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kKeys = 64;   // of a block
constexpr int kRowTile = 6;
constexpr float kNone = -3.0e38f;  // score of a key that a row does not see

// Memory of one thread, kept for its next call.
struct Scratch {
  float* data = nullptr;
  size_t size = 0;

  float* at_least(size_t floats) {
    if (size < floats) {
      std::free(data);
      data = static_cast<float*>(std::aligned_alloc(64, (floats * 4 + 63) / 64 * 64));
      size = data ? floats : 0;
    }
    return data;
  }
  ~Scratch() { std::free(data); }
};

thread_local Scratch scratch;

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
  for (int key = 0; key < kKeys; key += 8) {
    for (int d = 0; d < a.head_dim; d += 8) {
      __m256 r[8];
      for (int i = 0; i < 8; ++i) {
        r[i] = key + i < count ? load8(a.type, a.k.data, from + (key + i) * a.k.stride[2] + d) : _mm256_setzero_ps();
      }
      transpose8(r);
      for (int i = 0; i < 8; ++i) _mm256_store_ps(dst + (d + i) * kKeys + key, r[i]);
    }
  }
}

// out[R][16] (stride kKeys or value_dim) = or += left[R][n] * right[n][16].
template <int R, bool kAdd>
inline __attribute__((always_inline)) void product(const float* left, int64_t left_stride, const float* right,
                                                   int64_t right_stride, int n, float* out, int64_t out_stride) {
  __m256 acc[R][2];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    acc[r][0] = kAdd ? _mm256_load_ps(out + r * out_stride) : _mm256_setzero_ps();
    acc[r][1] = kAdd ? _mm256_load_ps(out + r * out_stride + 8) : _mm256_setzero_ps();
  }
  for (int i = 0; i < n; ++i, right += right_stride) {
    const __m256 low = _mm256_load_ps(right), high = _mm256_load_ps(right + 8);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 l = _mm256_broadcast_ss(left + r * left_stride + i);
      acc[r][0] = _mm256_fmadd_ps(l, low, acc[r][0]);
      acc[r][1] = _mm256_fmadd_ps(l, high, acc[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    _mm256_store_ps(out + r * out_stride, acc[r][0]);
    _mm256_store_ps(out + r * out_stride + 8, acc[r][1]);
  }
}

template <bool kAdd>
void products(int rows, int columns, const float* left, int64_t left_stride, const float* right, int64_t right_stride,
              int n, float* out, int64_t out_stride) {
  using Fn = void (*)(const float*, int64_t, const float*, int64_t, int, float*, int64_t);
  constexpr Fn kBySize[kRowTile + 1] = {nullptr,          product<1, kAdd>, product<2, kAdd>, product<3, kAdd>,
                                        product<4, kAdd>, product<5, kAdd>, product<6, kAdd>};
  const int tiles = (rows + kRowTile - 1) / kRowTile;  // of even size: a small one would wait for its own sums
  for (int i = 0, r = 0; i < tiles; ++i) {
    const int size = rows * (i + 1) / tiles - r;
    const Fn fn = kBySize[size];
    for (int c = 0; c < columns; c += 16) {
      fn(left + r * left_stride, left_stride, right + c, right_stride, n, out + r * out_stride + c, out_stride);
    }
    r += size;
  }
}

inline float max_of(__m256 v) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

inline float sum_of(__m256 v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// scores of one row become weights relative to the greatest so far; returns the factor for what was summed before.
float softmax_block(float* scores, int visible, float& most, float& sum) {
  for (int i = visible; i < kKeys; ++i) scores[i] = kNone;
  __m256 m = _mm256_set1_ps(most);
  for (int i = 0; i < kKeys; i += 8) m = _mm256_max_ps(_mm256_load_ps(scores + i), m);
  const float top = max_of(m);
  const __m256 t = _mm256_set1_ps(top), none = _mm256_set1_ps(kNone);
  __m256 total = _mm256_setzero_ps();
  for (int i = 0; i < kKeys; i += 8) {
    const __m256 s = _mm256_load_ps(scores + i);
    const __m256 e = _mm256_andnot_ps(_mm256_cmp_ps(s, none, _CMP_EQ_OQ), exp_ps(_mm256_sub_ps(s, t)));
    total = _mm256_add_ps(total, e);
    _mm256_store_ps(scores + i, e);
  }
  const float factor = most == kNone ? 0.0f : _mm256_cvtss_f32(exp_ps(_mm256_set1_ps(most - top)));
  sum = sum * factor + sum_of(total);
  most = top;
  return factor;
}

}  // namespace

void attend(const AttentionArgs& a, int64_t batch, int kv_head, int64_t first, int64_t last) {
  const int group = a.heads / a.kv_heads, rows = int(last - first) * group;
  const int d = a.head_dim, dv = a.value_dim;
  float* memory = scratch.at_least(size_t(rows) * size_t(d + dv + kKeys + 2) + size_t(kKeys) * size_t(d + dv) + 64);
  float* keys = memory;                      // [head_dim][kKeys]
  float* values = keys + kKeys * d;          // [kKeys][value_dim]
  float* scores = values + kKeys * dv;       // [rows][kKeys]
  float* out = scores + rows * kKeys;        // [rows][value_dim]
  float* query = out + int64_t(rows) * dv;   // [rows][head_dim]
  float *most = query + int64_t(rows) * d, *sum = most + rows;

  // Row r is token first + r / group, head kv_head * group + r % group.
  const __m256 scale = _mm256_set1_ps(a.scale);
  for (int r = 0; r < rows; ++r) {
    const int64_t at = batch * a.q.stride[0] + (kv_head * group + r % group) * a.q.stride[1] + (first + r / group) * a.q.stride[2];
    for (int i = 0; i < d; i += 8) _mm256_store_ps(query + r * d + i, _mm256_mul_ps(load8(a.type, a.q.data, at + i), scale));
    for (int i = 0; i < dv; i += 8) _mm256_store_ps(out + r * dv + i, _mm256_setzero_ps());
    most[r] = kNone;
    sum[r] = 0;
  }

  const int64_t before = a.keys - a.tokens;
  const int64_t seen = before + last;  // by the last token of the task
  for (int64_t from = 0; from < seen; from += kKeys) {
    const int count = int(seen - from < kKeys ? seen - from : kKeys);
    load_keys(a, batch * a.k.stride[0] + kv_head * a.k.stride[1] + from * a.k.stride[2], count, keys);
    const int64_t v = batch * a.v.stride[0] + kv_head * a.v.stride[1] + from * a.v.stride[2];
    for (int key = 0; key < count; ++key) {
      for (int i = 0; i < dv; i += 8) _mm256_store_ps(values + key * dv + i, load8(a.type, a.v.data, v + key * a.v.stride[2] + i));
    }
    products<false>(rows, kKeys, query, d, keys, kKeys, d, scores, kKeys);
    for (int r = 0; r < rows; ++r) {
      const int64_t visible = before + first + r / group + 1 - from;
      const int limit = int(visible < 0 ? 0 : visible < count ? visible : count);
      const float factor = softmax_block(scores + r * kKeys, limit, most[r], sum[r]);
      if (factor == 1.0f) continue;
      const __m256 f = _mm256_set1_ps(factor);
      for (int i = 0; i < dv; i += 8) _mm256_store_ps(out + r * dv + i, _mm256_mul_ps(f, _mm256_load_ps(out + r * dv + i)));
    }
    products<true>(rows, dv, scores, kKeys, values, dv, count, out, dv);
  }

  const size_t size = a.type == FloatType::kFloat32 ? 4 : 2;
  for (int r = 0; r < rows; ++r) {
    const __m256 inverse = _mm256_set1_ps(1.0f / sum[r]);
    for (int i = 0; i < dv; i += 8) _mm256_store_ps(out + r * dv + i, _mm256_mul_ps(inverse, _mm256_load_ps(out + r * dv + i)));
    const int64_t at = ((batch * a.tokens + first + r / group) * a.heads + kv_head * group + r % group) * dv;
    store(a.type, out + r * dv, static_cast<char*>(a.out) + size_t(at) * size, size_t(dv));
  }
}

}  // namespace avx2
}  // namespace int4moe
