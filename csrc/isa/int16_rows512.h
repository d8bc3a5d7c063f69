// The rows of 16-bit activations that the AVX-512 VNNI and AMX kernels of W4A16 share: int16 [lines * 8], each line in the
// order 0 2 4 6 1 3 5 7; then for every segment a float scale and an int32, -8 * (sum of its integers).
//
// A bfloat16 or float16 activation x becomes round(x / s) with s = max|x| / 32767 over the stretch, an error of 2^-16 of
// the largest; that is finer than the rounding of the result to 16 bits. A segment is a group, or a part of a group that is
// longer than kInt16SegmentLines (for int32 to hold its sums); a stretch is as many groups as there are in
// kInt16StretchLines, or one segment. For one (row, token), stretch by stretch, with d = sum((code - zero) * x) of a segment:
//   part = float(d) * weight scale, then part = fma(float(d), weight scale, part); total = fma(part, s, total)
// d is an exact integer, in whatever order and by whatever products it is summed: all kernels agree to the bit, that of AVX2
// too, and the AMX row may choose by the number of tokens.
#pragma once

#include "isa/avx512_common.h"

namespace int4moe {
namespace avx512 {
namespace {

constexpr int kInt16SegmentLines = 128;  // 15 * 32767 * 1024 < 2^31
constexpr int kInt16StretchLines = 16;

INT4MOE_INLINE int int16_groups_per_stretch(const Matrix& m) {
  return m.group_lines() < kInt16StretchLines ? kInt16StretchLines / m.group_lines() : 1;
}

INT4MOE_INLINE int int16_segments(const Matrix& m) {
  const int most = kInt16SegmentLines, rest = m.lines - (m.groups - 1) * m.group_lines();
  return (m.groups - 1) * ((m.group_lines() + most - 1) / most) + (rest + most - 1) / most;
}

INT4MOE_INLINE size_t int16_values_bytes(const Matrix& m) { return size_t(m.lines) * kLineColumns * 2; }

INT4MOE_INLINE size_t int16_row_bytes(const Matrix& m) {
  return ((int16_values_bytes(m) + 8 * size_t(int16_segments(m)) + 63) / 64 | 1) * 64;
}

INT4MOE_INLINE __m256 int16_load_line(const Matrix& m, const float* x, int line) {
  const int left = m.columns - line * kLineColumns;
  return _mm256_maskz_loadu_ps(left >= 8 ? 0xff : __mmask8((1u << left) - 1), x + line * kLineColumns);
}

// Quantises lines [from, to), a stretch, in segments of `lines`. Returns where the next segments' scale and sum go.
inline uint8_t* int16_prepare_stretch(const Matrix& m, const float* x, int from, int to, int lines, uint8_t* row,
                                      uint8_t* tail) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  __m256 most = _mm256_setzero_ps(), nothing = _mm256_setzero_ps();
  for (int l = from; l < to; ++l) {
    const __m256 v = int16_load_line(m, x, l);
    most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v));
    nothing = _mm256_fmadd_ps(v, _mm256_setzero_ps(), nothing);  // 0, or NaN once a value is not finite
  }
  const float largest = max_lanes(most), scale = largest * (1.0f / 32767.0f) + sum_lanes(nothing);
  // Below 1e-30 the inverse would overflow, and nothing that small matters.
  const __m256 inverse = _mm256_set1_ps(largest > 1e-30f ? 32767.0f / largest : 0.0f);
  for (int l = from; l < to; tail += 8) {
    const int end = l + lines < to ? l + lines : to;
    __m256i sum = _mm256_setzero_si256();
    for (; l < end; ++l) {
      const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(int16_load_line(m, x, l), inverse));
      sum = _mm256_add_epi32(sum, q);
      const __m128i words = _mm256_cvtsepi32_epi16(q);
      _mm_store_si128(reinterpret_cast<__m128i*>(row) + l, _mm_shuffle_epi8(words, order));
    }
    const uint32_t eight = 0u - 8u * uint32_t(sum_lanes(sum));  // any value at all where an activation is not finite
    __builtin_memcpy(tail, &scale, 4);
    __builtin_memcpy(tail + 4, &eight, 4);
  }
  return tail;
}

inline void int16_prepare(const Matrix& m, const float* x, uint8_t* row) {
  uint8_t* tail = row + int16_values_bytes(m);
  const int stretch = int16_groups_per_stretch(m) * m.group_lines(), most = kInt16SegmentLines;
  for (int from = 0; from < m.lines; from += stretch) {
    const int end = from + stretch < m.lines ? from + stretch : m.lines;
    if (m.group_lines() < kInt16StretchLines) {
      tail = int16_prepare_stretch(m, x, from, end, m.group_lines(), row, tail);
      continue;
    }
    for (int l = from; l < end; l += most) {
      tail = int16_prepare_stretch(m, x, l, l + most < end ? l + most : end, most, row, tail);
    }
  }
}

}  // namespace
}  // namespace avx512
}  // namespace int4moe
