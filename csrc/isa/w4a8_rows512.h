// The rows of activations that the AVX-512 VNNI and AMX kernels of W4A8 share: int8 [lines * 8] (padded by zeros to whole
// 64-byte tiles), then the scale of each segment (float), then a float for each group: -8 * (sum of its activations), which
// is what a zero point of 8 adds.
//
// A segment is 128 columns, or 64 of an input with heavy tails, or what is left of a group: as short as the accuracy of
// W4A8 needs, since on AMX the sums of a segment cost more than its products. For one (row, token), group by group: for the
// first segment of int8 values q
//   total = fma(fma(float(sum(code * q)), scale of the segment, zero / 8 * the group's float), scale of the weights, total)
// and for the others total = fma(float(sum(code * q)), scale of the weights * scale of the segment, total). Sums of a segment
// are exact, so both kernels agree to the bit, and the AMX row may choose by the number of tokens.
#pragma once

#include "isa/avx512_common.h"

namespace int4moe {
namespace avx512 {
namespace {

INT4MOE_INLINE int w4a8_segment_lines(const Matrix& m) { return m.heavy_tails ? 8 : 16; }

INT4MOE_INLINE int w4a8_segments(const Matrix& m) {
  const int lines = w4a8_segment_lines(m), rest = m.lines - (m.groups - 1) * m.group_lines();
  return (m.groups - 1) * ((m.group_lines() + lines - 1) / lines) + (rest + lines - 1) / lines;
}

INT4MOE_INLINE size_t w4a8_values(const Matrix& m) { return (size_t(m.lines) * kLineColumns / 64 + 2) * 64; }

// Where the floats of segments and of groups lie in a row.
INT4MOE_INLINE size_t w4a8_scales(const Matrix& m) { return w4a8_values(m); }
INT4MOE_INLINE size_t w4a8_sums(const Matrix& m) { return w4a8_scales(m) + 4 * size_t(w4a8_segments(m)); }

INT4MOE_INLINE size_t w4a8_row_bytes(const Matrix& m) {
  return ((w4a8_sums(m) + 4 * size_t(m.groups) + 63) / 64 | 1) * 64;
}

// Quantises columns [from, to); returns -8 * (sum of these activations as quantised).
inline float w4a8_prepare_segment(const float* x, int from, int to, uint8_t* row, float* scale) {
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
  *scale = largest * (1.0f / 127.0f) + _mm512_reduce_add_ps(nothing);
  // Not _mm512_reduce_add_epi32: what is not finite may overflow, which compilers may not see as signed addition.
  const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(sum), _mm512_extracti64x4_epi64(sum, 1));
  return *scale * (-8.0f * float(sum_lanes(half)));
}

inline void w4a8_prepare(const Matrix& m, const float* x, uint8_t* row) {
  const size_t values = w4a8_values(m);
  for (size_t at = size_t(m.lines) * kLineColumns / 64 * 64; at < values; at += 64) {
    _mm512_store_si512(row + at, _mm512_setzero_si512());
  }
  auto* scale = reinterpret_cast<float*>(row + w4a8_scales(m));
  auto* sums = reinterpret_cast<float*>(row + w4a8_sums(m));
  const int step = w4a8_segment_lines(m) * kLineColumns;
  for (int g = 0; g < m.groups; ++g) {
    const int from = g * m.group_size, end = from + m.group_size < m.columns ? from + m.group_size : m.columns;
    float sum = 0;
    for (int k = from; k < end; k += step) {
      sum += w4a8_prepare_segment(x, k, k + step < end ? k + step : end, row, scale++);
    }
    sums[g] = sum;
  }
}

// Scales of a group of a block and, where zero points are stored, an eighth of them.
struct W4A8Group {
  __m512 scale, zero;
};

INT4MOE_INLINE W4A8Group w4a8_group(const Matrix& m, const uint8_t* scales, const uint8_t* zeros, int group) {
  const __m512 s = load_scales(m, scales, group);
  if (!zeros) return {s, s};
  return {s, _mm512_mul_ps(_mm512_cvtepi32_ps(load_zeros(zeros, group)), _mm512_set1_ps(0.125f))};
}

// The total with the sums of one more segment. kHead: the group's first.
template <bool kHead, bool kZeros>
INT4MOE_INLINE __m512 w4a8_add(const W4A8Group& group, __m512i sums, float scale, float sum, __m512 total) {
  const __m512 d = _mm512_cvtepi32_ps(sums), segment = _mm512_set1_ps(scale);
  if constexpr (!kHead) return _mm512_fmadd_ps(d, _mm512_mul_ps(group.scale, segment), total);
  __m512 start = _mm512_set1_ps(sum);
  if constexpr (kZeros) start = _mm512_mul_ps(group.zero, start);
  return _mm512_fmadd_ps(_mm512_fmadd_ps(d, segment, start), group.scale, total);
}

}  // namespace
}  // namespace avx512
}  // namespace int4moe
