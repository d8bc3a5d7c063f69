// The rows of activations that the AVX-512 VNNI and AMX kernels of W4A8 share: int8 [lines * 8] (padded by zeros to whole
// 64-byte tiles), then for each group the scale (float) and the sum of the int8 values (int32).
//
// Both compute, for one (row, token): total = fma(float(d), weight scale * activation scale, total), segment by segment,
// where d = sum((code - zero) * x) over the segment, exactly. A segment is a group, or a part of a group that is longer
// than kSegmentLines; hence they agree to the bit, and the AMX row may choose by the number of tokens.
#pragma once

#include "isa/avx512_common.h"

namespace int4moe {
namespace avx512 {
namespace {

constexpr int kSegmentLines = 128;  // 1024 columns

INT4MOE_INLINE size_t w4a8_values(const Matrix& m) { return (size_t(m.lines) * kLineColumns / 64 + 2) * 64; }

INT4MOE_INLINE size_t w4a8_row_bytes(const Matrix& m) {
  return ((w4a8_values(m) + 8 * size_t(m.groups) + 63) / 64 | 1) * 64;
}

INT4MOE_INLINE float w4a8_scale(const Matrix& m, const uint8_t* row, int group) {
  return float_at(row + w4a8_values(m) + 4 * size_t(group));
}

INT4MOE_INLINE int32_t w4a8_sum(const Matrix& m, const uint8_t* row, int group) {
  return int_at(row + w4a8_values(m) + 4 * size_t(m.groups + group));
}

inline void w4a8_prepare(const Matrix& m, const float* x, uint8_t* row) {
  const size_t values = w4a8_values(m);
  for (size_t at = size_t(m.lines) * kLineColumns / 64 * 64; at < values; at += 64) {
    _mm512_store_si512(row + at, _mm512_setzero_si512());
  }
  for (int g = 0; g < m.groups; ++g) {
    const int from = g * m.group_size, to = from + m.group_size < m.columns ? from + m.group_size : m.columns;
    __m512 most = _mm512_setzero_ps(), nothing = _mm512_setzero_ps();
    for (int k = from; k < to; k += 16) {
      const __m512 v = _mm512_maskz_loadu_ps(first_lanes(size_t(to - k)), x + k);
      most = _mm512_max_ps(most, _mm512_abs_ps(v));
      nothing = _mm512_fmadd_ps(v, _mm512_setzero_ps(), nothing);  // 0, or NaN once a value is not finite
    }
    const float largest = _mm512_reduce_max_ps(most);
    // Below 1e-30 the inverse would overflow, and nothing that small matters.
    const __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? 127.0f / largest : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int k = from; k < to; k += 16) {
      const __mmask16 lanes = first_lanes(size_t(to - k));
      const __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + k), inverse));
      sum = _mm512_add_epi32(sum, q);
      _mm512_mask_cvtsepi32_storeu_epi8(row + k, lanes, q);
    }
    const float scale = largest * (1.0f / 127.0f) + _mm512_reduce_add_ps(nothing);
    const int32_t total = _mm512_reduce_add_epi32(sum);
    __builtin_memcpy(row + values + 4 * size_t(g), &scale, 4);
    __builtin_memcpy(row + values + 4 * size_t(m.groups + g), &total, 4);
  }
}

}  // namespace
}  // namespace avx512
}  // namespace int4moe
