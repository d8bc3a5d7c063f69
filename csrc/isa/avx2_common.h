// What the AVX2 rows share. Included by files compiled with -mavx2 -mfma -mf16c only; everything has internal linkage.
#pragma once

#include <immintrin.h>

#include "isa/kernels.h"

// Loops over registers: every one has to disappear, or the accumulators land in memory.
#if defined(__clang__)
#define INT4MOE_UNROLL _Pragma("unroll")
#else
#define INT4MOE_UNROLL _Pragma("GCC unroll 16")
#endif
#define INT4MOE_INLINE inline __attribute__((always_inline))

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kHalf = 8;  // rows of a block per vector

// Bytes that codes are fetched ahead of their use, into the second-level cache: a core has too few lines in flight to its
// first level for the latency of memory times its share of the bandwidth.
constexpr ptrdiff_t kAhead = 16384;

// The same where only `bytes` are read in sequence before reading goes on elsewhere.
inline ptrdiff_t ahead_within(ptrdiff_t bytes) { return bytes < kAhead ? bytes : kAhead; }

// In assembly, because g++ 12 drops the intrinsic from some loops.
inline void prefetch(const uint8_t* p) { __asm__ volatile("prefetcht1 %0" : : "m"(*p)); }

// The scales of rows 0-7 and 8-15 of one group.
struct Pair {
  __m256 low, high;
};

template <ScaleType T>
inline Pair load_scales(const uint8_t* p) {
  if constexpr (T == ScaleType::kFloat32) {
    const auto* f = reinterpret_cast<const float*>(p);
    return {_mm256_loadu_ps(f), _mm256_loadu_ps(f + 8)};
  } else {
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + 1);
    if constexpr (T == ScaleType::kFloat16) {
      return {_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)};
    } else {
      return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16)),
              _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16))};
    }
  }
}

// The 16 zero points of one group as int32.
struct IntPair {
  __m256i low, high;
};

inline IntPair load_zeros(const uint8_t* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i even = _mm_and_si128(bytes, mask), odd = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  const __m128i rows = _mm_unpacklo_epi8(even, odd);
  return {_mm256_cvtepu8_epi32(rows), _mm256_cvtepu8_epi32(_mm_srli_si128(rows, 8))};
}

inline __m256 abs_ps(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

inline float sum_lanes(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

inline float max_lanes(__m256 v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

// e^x with a relative error below 2e-7; 0 below -87.3, infinity above 88.7, NaN stays NaN.
inline __m256 exp_ps(__m256 x) {
  const __m256 low = _mm256_set1_ps(-87.33654f), high = _mm256_set1_ps(88.722839f);
  const __m256 under = _mm256_cmp_ps(x, low, _CMP_LT_OQ), over = _mm256_cmp_ps(x, high, _CMP_GT_OQ);
  const __m256 clipped = _mm256_max_ps(low, _mm256_min_ps(high, x));  // NaN passes: the second operand is kept
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(clipped, _mm256_set1_ps(1.44269504f)),
                                   _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  // r = x - n ln 2 with ln 2 in two parts, |r| <= 0.347; then the Taylor polynomial of degree 7.
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), clipped);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.0f / 5040);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 720));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  // 2^n in two factors, as n may be 128.
  const __m256i e = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(e, 1), rest = _mm256_sub_epi32(e, half);
  const __m256i bias = _mm256_set1_epi32(127);
  p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
  p = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
  p = _mm256_blendv_ps(p, _mm256_setzero_ps(), under);
  return _mm256_blendv_ps(p, _mm256_set1_ps(__builtin_inff()), over);
}

// x * sigmoid(s)
inline __m256 gated_by_sigmoid(__m256 x, __m256 s) {
  const __m256 one = _mm256_set1_ps(1.0f);
  const __m256 e = exp_ps(_mm256_xor_ps(s, _mm256_set1_ps(-0.0f)));
  return _mm256_div_ps(x, _mm256_add_ps(one, e));
}

inline __m256 gelu_exact(__m256 x) {
  alignas(32) float v[8];
  _mm256_store_ps(v, x);
  for (float& f : v) f = 0.5f * f * (1.0f + __builtin_erff(f * 0.70710678118654752f));
  return _mm256_load_ps(v);
}

template <ActivationKind K>
inline __m256 function(__m256 x) {
  if constexpr (K == ActivationKind::kSilu) {
    return gated_by_sigmoid(x, x);
  } else if constexpr (K == ActivationKind::kGelu) {
    return gelu_exact(x);
  } else if constexpr (K == ActivationKind::kGeluTanh) {
    // 0.5 x (1 + tanh(u)) = x sigmoid(2 u)
    const __m256 x2 = _mm256_mul_ps(x, x);
    const __m256 cubic = _mm256_fmadd_ps(x2, _mm256_set1_ps(0.044715f), _mm256_set1_ps(1.0f));
    return gated_by_sigmoid(x, _mm256_mul_ps(_mm256_mul_ps(x, cubic), _mm256_set1_ps(1.5957691216057308f)));
  } else {
    const __m256 r = _mm256_max_ps(_mm256_setzero_ps(), x);  // keeps NaN
    return _mm256_mul_ps(r, r);
  }
}

template <ActivationKind K>
inline void activate_all(const float* gate, const float* up, float* h, size_t count) {
  for (size_t i = 0; i < count; i += 8) {
    const __m256 u = _mm256_load_ps(up + i);
    _mm256_store_ps(h + i, gate ? _mm256_mul_ps(function<K>(_mm256_load_ps(gate + i)), u) : function<K>(u));
  }
}

void activate(ActivationKind kind, float alpha, float limit, const float* gate, const float* up, float* h,
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
  const __m256 most = _mm256_set1_ps(limit), least = _mm256_set1_ps(-limit), a = _mm256_set1_ps(alpha);
  for (size_t i = 0; i < count; i += 8) {
    const __m256 g = _mm256_min_ps(most, _mm256_load_ps(gate + i));
    const __m256 u = _mm256_max_ps(least, _mm256_min_ps(most, _mm256_load_ps(up + i)));
    const __m256 left = gated_by_sigmoid(g, _mm256_mul_ps(a, g));
    _mm256_store_ps(h + i, _mm256_mul_ps(left, _mm256_add_ps(u, _mm256_set1_ps(1.0f))));
  }
}

inline float half_to_float(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }

inline float bf16_to_float(uint16_t h) { return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(int(uint32_t(h) << 16)))); }

// 8 values of a 16-bit float type as float32.
inline __m256 as_floats(FloatType type, __m128i bits) {
  if (type == FloatType::kFloat16) return _mm256_cvtph_ps(bits);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

void load(FloatType type, const void* x, const int32_t* perm, float* dst, size_t count) {
  const auto* h = static_cast<const uint16_t*>(x);
  const auto* f = static_cast<const float*>(x);
  size_t j = 0;
  if (perm) {
    if (type == FloatType::kFloat32) {
      for (; j < count; ++j) dst[j] = f[perm[j]];
      return;
    }
    for (; j + 8 <= count; j += 8) {
      const int32_t* k = perm + j;
      const __m128i bits = _mm_setr_epi16(h[k[0]], h[k[1]], h[k[2]], h[k[3]], h[k[4]], h[k[5]], h[k[6]], h[k[7]]);
      _mm256_storeu_ps(dst + j, as_floats(type, bits));
    }
    for (; j < count; ++j) dst[j] = type == FloatType::kFloat16 ? half_to_float(h[perm[j]]) : bf16_to_float(h[perm[j]]);
    return;
  }
  for (; j + 8 <= count; j += 8) {
    __m256 v;
    if (type == FloatType::kFloat32) {
      v = _mm256_loadu_ps(f + j);
    } else {
      v = as_floats(type, _mm_loadu_si128(reinterpret_cast<const __m128i*>(h + j)));
    }
    _mm256_storeu_ps(dst + j, v);
  }
  for (; j < count; ++j) {
    dst[j] = type == FloatType::kFloat32 ? f[j] : type == FloatType::kFloat16 ? half_to_float(h[j]) : bf16_to_float(h[j]);
  }
}

inline __m128i to_bf16(__m256 v) {
  const __m256i u = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_packus_epi32(rounded, rounded);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

void store(FloatType type, const float* x, void* dst, size_t count) {
  size_t j = 0;
  if (type == FloatType::kFloat32) {
    auto* f = static_cast<float*>(dst);
    for (; j + 8 <= count; j += 8) _mm256_storeu_ps(f + j, _mm256_loadu_ps(x + j));
    for (; j < count; ++j) f[j] = x[j];
    return;
  }
  auto* h = static_cast<uint16_t*>(dst);
  const auto convert = [type](__m256 v) {
    return type == FloatType::kFloat16 ? _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT) : to_bf16(v);
  };
  for (; j + 8 <= count; j += 8) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(h + j), convert(_mm256_loadu_ps(x + j)));
  }
  for (; j < count; ++j) h[j] = uint16_t(_mm_extract_epi16(convert(_mm256_set1_ps(x[j])), 0));
}

void accumulate(float weight, const float* x, const float* bias, float* y, size_t count) {
  const __m256 w = _mm256_set1_ps(weight);
  size_t j = 0;
  for (; j + 8 <= count; j += 8) {
    __m256 v = _mm256_loadu_ps(x + j);
    if (bias) v = _mm256_add_ps(v, _mm256_loadu_ps(bias + j));
    _mm256_storeu_ps(y + j, _mm256_fmadd_ps(w, v, _mm256_loadu_ps(y + j)));
  }
  for (; j < count; ++j) y[j] = __builtin_fmaf(weight, bias ? x[j] + bias[j] : x[j], y[j]);
}

}  // namespace
}  // namespace avx2
}  // namespace int4moe
