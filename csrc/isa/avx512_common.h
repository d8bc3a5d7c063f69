// What the AVX-512 and AMX rows share. Included by files compiled with at least -mavx512{f,bw,vl,dq} only; everything has
// internal linkage.
#pragma once

#include <immintrin.h>

#include "isa/kernels.h"

namespace int4moe {
namespace avx512 {
namespace {

#define INT4MOE_INLINE inline __attribute__((always_inline))

// Bytes that codes are fetched ahead of their use, into the second-level cache: a core has too few lines in flight to its
// first level for the latency of memory times its share of the bandwidth.
constexpr ptrdiff_t kAhead = 16384;

INT4MOE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

// Lanes 0 .. count-1.
INT4MOE_INLINE __mmask16 first_lanes(size_t count) { return count >= 16 ? 0xffff : __mmask16((1u << count) - 1); }

// The scales of one group of one block.
INT4MOE_INLINE __m512 load_scales(const Matrix& m, const uint8_t* scales, int group) {
  const uint8_t* p = scales + size_t(group) * kBlockRows * scale_bytes(m.scale_type);
  if (m.scale_type == ScaleType::kFloat32) return _mm512_loadu_ps(p);
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  if (m.scale_type == ScaleType::kFloat16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// The 16 zero points of one group of one block, as int32.
INT4MOE_INLINE __m512i load_zeros(const uint8_t* zeros, int group) {
  if (!zeros) return _mm512_set1_epi32(8);
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(zeros + size_t(group) * (kBlockRows / 2)));
  const __m512i byte_of_row = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
  const __m512i shift = _mm512_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4);
  return _mm512_and_si512(_mm512_srlv_epi32(byte_of_row, shift), _mm512_set1_epi32(15));
}

INT4MOE_INLINE int32_t int_at(const uint8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

INT4MOE_INLINE float float_at(const uint8_t* p) {
  float v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

INT4MOE_INLINE float max_lanes(__m256 v) {
  const __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

INT4MOE_INLINE float sum_lanes(__m256 v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

INT4MOE_INLINE int32_t sum_lanes(__m256i v) {
  const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  const __m128i pair = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(pair, _mm_shuffle_epi32(pair, 0xb1)));
}

// How `count` tokens are cut into tiles of at most `most`, as evenly as possible: tile i starts at start(i).
struct Tiles {
  int count, tiles;

  INT4MOE_INLINE Tiles(int count_, int most) : count(count_), tiles((count_ + most - 1) / most) {}
  INT4MOE_INLINE int start(int i) const { return int(int64_t(count) * i / tiles); }
};

// --- tiles of B blocks by M tokens

// How a row cuts its work. K::tile<B, M>(matrix, block, rows, out, out_stride, next) computes B blocks for M tokens, for up
// to K::kTokens of these, and K::blocks(M) says how many: as many independent sums as the 32 registers hold. With few tokens
// one block at a time is faster, as memory is then read in one stream.
template <class K>
struct Tiled {
  using Function = void (*)(const Matrix&, int, const uint8_t* const*, float*, size_t, const uint8_t*);

  template <int M, int B>
  static void fill(Function (&table)[4]) {
    table[B - 1] = K::template tile<B, M>;
    if constexpr (B > 1) fill<M, B - 1>(table);
  }

  template <int M>
  static void fill(Function (&table)[K::kTokens][4]) {
    fill<M, K::blocks(M)>(table[M - 1]);
    if constexpr (M > 1) fill<M - 1>(table);
  }

  static void multiply(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                       const uint8_t* next) {
    Function table[K::kTokens][4];
    fill<K::kTokens>(table);
    const Tiles tiles(rows.count, K::kTokens);
    for (int i = 0; i < tiles.tiles; ++i) {
      const int from = tiles.start(i), tokens = tiles.start(i + 1) - from, most = K::blocks(tokens);
      const uint8_t* x[K::kTokens];
      for (int t = 0; t < tokens; ++t) x[t] = rows.at(from + t);
      for (int b = 0, step; b < blocks; b += step) {
        step = blocks - b < most ? blocks - b : most;
        const uint8_t* after = nullptr;
        if (b + step < blocks) {
          after = m.block_codes(first + b + step);
        } else if (i + 1 == tiles.tiles) {
          after = next;
        }
        table[tokens - 1][step - 1](m, first + b, x, out + from * out_stride + size_t(b) * kBlockRows, out_stride, after);
      }
    }
  }
};

// Where to prefetch while line l of `streams` blocks side by side is read: kAhead further on in the order of reading, which
// for the last lines is in `next`.
struct Ahead {
  int switch_line;
  ptrdiff_t same, jump;

  INT4MOE_INLINE Ahead(const Matrix& m, const uint8_t* codes, const uint8_t* next, int streams = 1)
      : switch_line(m.lines - int(kAhead / kLineBytes) / streams),
        same(kAhead / streams),
        jump(next ? next - codes - ptrdiff_t(switch_line) * kLineBytes : 0) {}
  INT4MOE_INLINE ptrdiff_t operator()(int line) const { return line < switch_line ? same : jump; }
};

// A vector for each of B blocks and M tokens: in registers, or at `out` as `multiply` wants them.
template <int B, int M, bool kKept>
struct Vectors {
  __m512 kept[B][kKept ? M : 1];
  float* out;
  size_t stride;

  INT4MOE_INLINE Vectors(float* out_, size_t stride_) : out(out_), stride(stride_) {
    __asm__("" : "+r"(out));  // compilers would keep in registers what is in memory so that it takes none
  }
  INT4MOE_INLINE void clear() {
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
#pragma GCC unroll 12
      for (int t = 0; t < M; ++t) set(b, t, _mm512_setzero_ps());
    }
  }
  INT4MOE_INLINE __m512 get(int b, int t) const {
    if constexpr (kKept) return kept[b][t];
    return _mm512_load_ps(out + t * stride + b * kBlockRows);
  }
  INT4MOE_INLINE void set(int b, int t, __m512 v) {
    if constexpr (kKept) {
      kept[b][t] = v;
    } else {
      _mm512_store_ps(out + t * stride + b * kBlockRows, v);
    }
  }
  INT4MOE_INLINE void store() {
    if constexpr (!kKept) return;
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
#pragma GCC unroll 12
      for (int t = 0; t < M; ++t) _mm512_store_ps(out + t * stride + b * kBlockRows, kept[b][t]);
    }
  }
};

// --- elementwise

// e^x with a relative error below 2e-7; 0 below -87.3, infinity above 88.7, NaN stays NaN.
INT4MOE_INLINE __m512 exp_ps(__m512 x) {
  const __m512 low = _mm512_set1_ps(-87.33654f), high = _mm512_set1_ps(88.722839f);
  const __m512 clipped = _mm512_max_ps(low, _mm512_min_ps(high, x));  // NaN passes: the second operand is kept
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clipped, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // r = x - n ln 2 with ln 2 in two parts, |r| <= 0.347; then the Taylor polynomial of degree 7.
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clipped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_scalef_ps(p, n);
  p = _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, low, _CMP_LT_OQ), _mm512_setzero_ps());
  return _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, high, _CMP_GT_OQ), _mm512_set1_ps(__builtin_inff()));
}

// x * sigmoid(s)
INT4MOE_INLINE __m512 gated_by_sigmoid(__m512 x, __m512 s) {
  const __m512 e = exp_ps(_mm512_xor_ps(s, _mm512_set1_ps(-0.0f)));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

template <ActivationKind K>
INT4MOE_INLINE __m512 function(__m512 x) {
  if constexpr (K == ActivationKind::kSilu) {
    return gated_by_sigmoid(x, x);
  } else if constexpr (K == ActivationKind::kGelu) {
    alignas(64) float v[16];
    _mm512_store_ps(v, x);
    for (float& f : v) f = 0.5f * f * (1.0f + __builtin_erff(f * 0.70710678118654752f));
    return _mm512_load_ps(v);
  } else if constexpr (K == ActivationKind::kGeluTanh) {
    // 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
    return gated_by_sigmoid(x, _mm512_mul_ps(_mm512_mul_ps(x, cubic), _mm512_set1_ps(1.5957691216057308f)));
  } else {
    const __m512 r = _mm512_max_ps(_mm512_setzero_ps(), x);  // keeps NaN
    return _mm512_mul_ps(r, r);
  }
}

template <ActivationKind K>
inline void activate_all(const float* gate, const float* up, float* h, size_t count) {
  for (size_t i = 0; i < count; i += 16) {
    const __m512 u = _mm512_load_ps(up + i);
    _mm512_store_ps(h + i, gate ? _mm512_mul_ps(function<K>(_mm512_load_ps(gate + i)), u) : function<K>(u));
  }
}

inline void activate(ActivationKind kind, float alpha, float limit, const float* gate, const float* up, float* h,
                     size_t count) {
  switch (kind) {
    case ActivationKind::kSilu:
      return activate_all<ActivationKind::kSilu>(gate, up, h, count);
    case ActivationKind::kGelu:
      return activate_all<ActivationKind::kGelu>(gate, up, h, count);
    case ActivationKind::kGeluTanh:
      return activate_all<ActivationKind::kGeluTanh>(gate, up, h, count);
    case ActivationKind::kRelu2:
      return activate_all<ActivationKind::kRelu2>(gate, up, h, count);
    case ActivationKind::kSwigluClamped:
      break;
  }
  const __m512 most = _mm512_set1_ps(limit), least = _mm512_set1_ps(-limit), a = _mm512_set1_ps(alpha);
  for (size_t i = 0; i < count; i += 16) {
    const __m512 g = _mm512_min_ps(most, _mm512_load_ps(gate + i));
    const __m512 u = _mm512_max_ps(least, _mm512_min_ps(most, _mm512_load_ps(up + i)));
    const __m512 left = gated_by_sigmoid(g, _mm512_mul_ps(a, g));
    _mm512_store_ps(h + i, _mm512_mul_ps(left, _mm512_add_ps(u, _mm512_set1_ps(1.0f))));
  }
}

// 16 values of a 16-bit float type as float32.
INT4MOE_INLINE __m512 widen(FloatType type, __m256i bits) {
  if (type == FloatType::kFloat16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

inline void load(FloatType type, const void* x, const int32_t* perm, float* dst, size_t count) {
  const auto* h = static_cast<const uint16_t*>(x);
  const auto* f = static_cast<const float*>(x);
  for (size_t j = 0; j < count; j += 16) {
    const __mmask16 lanes = first_lanes(count - j);
    __m512 v;
    if (type == FloatType::kFloat32) {
      v = perm ? _mm512_mask_i32gather_ps(_mm512_setzero_ps(), lanes, _mm512_maskz_loadu_epi32(lanes, perm + j), f, 4)
               : _mm512_maskz_loadu_ps(lanes, f + j);
    } else if (perm) {
      alignas(32) uint16_t bits[16] = {};
      for (size_t i = j; i < count && i < j + 16; ++i) bits[i - j] = h[size_t(perm[i])];
      v = widen(type, _mm256_load_si256(reinterpret_cast<const __m256i*>(bits)));
    } else {
      v = widen(type, _mm256_maskz_loadu_epi16(lanes, h + j));
    }
    _mm512_mask_storeu_ps(dst + j, lanes, v);
  }
}

// Rounded to nearest even; NaN stays NaN. (VCVTNEPS2BF16 is not there without AVX512-BF16, and flushes denormals.)
INT4MOE_INLINE __m256i to_bf16(__m512 v) {
  const __m512i u = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7fc0)));
}

inline void store(FloatType type, const float* x, void* dst, size_t count) {
  auto* h = static_cast<uint16_t*>(dst);
  for (size_t j = 0; j < count; j += 16) {
    const __mmask16 lanes = first_lanes(count - j);
    const __m512 v = _mm512_maskz_loadu_ps(lanes, x + j);
    if (type == FloatType::kFloat32) {
      _mm512_mask_storeu_ps(static_cast<float*>(dst) + j, lanes, v);
    } else if (type == FloatType::kFloat16) {
      _mm256_mask_storeu_epi16(h + j, lanes, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
    } else {
      _mm256_mask_storeu_epi16(h + j, lanes, to_bf16(v));
    }
  }
}

inline void accumulate(float weight, const float* x, const float* bias, float* y, size_t count) {
  const __m512 w = _mm512_set1_ps(weight);
  for (size_t j = 0; j < count; j += 16) {
    const __mmask16 lanes = first_lanes(count - j);
    __m512 v = _mm512_maskz_loadu_ps(lanes, x + j);
    if (bias) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(lanes, bias + j));
    _mm512_mask_storeu_ps(y + j, lanes, _mm512_fmadd_ps(w, v, _mm512_maskz_loadu_ps(lanes, y + j)));
  }
}

}  // namespace
}  // namespace avx512
}  // namespace int4moe
