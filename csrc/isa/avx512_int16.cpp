// W4A16 on AVX-512 VNNI, for 16-bit activations: int16 values with one scale per token and segment, exact int32 sums.
//
// A bfloat16 or float16 activation x becomes round(x / s) with s = max|x| / 32767 over the segment, an error of 2^-16 of
// the largest; that is finer than the rounding of the result to 16 bits. One instruction then takes two columns of 16
// rows, where float32 takes one, and needs no conversion. Sums of a segment are exact integers: any order gives the same
// bits. For one (row, token): total = fma(float(d), weight scale * s, total) with d = sum((code - zero) * x), segment by
// segment. A segment is a group, or a part of a group that is longer than kSegmentLines (for int32 to hold the sum).
#include "core/cpu_features.h"
#include "isa/avx512_common.h"

namespace int4moe {
namespace avx512 {
namespace {

constexpr int kSegmentLines = 128;  // 15 * 32767 * 1024 < 2^31

int segments_per_group(const Matrix& m) { return (m.group_lines() + kSegmentLines - 1) / kSegmentLines; }

// A row: int16 [lines * 8], each line in the order 0 2 4 6 1 3 5 7; float scale, int32 sum of every segment.
size_t values_bytes(const Matrix& m) { return size_t(m.lines) * kLineColumns * 2; }

size_t row_bytes(const Matrix& m) {
  const size_t segments = size_t(segments_per_group(m)) * size_t(m.groups);
  return ((values_bytes(m) + 8 * segments + 63) / 64 | 1) * 64;
}

INT4MOE_INLINE __m256 load_line(const Matrix& m, const float* x, int line) {
  const int left = m.columns - line * kLineColumns;
  return _mm256_maskz_loadu_ps(left >= 8 ? 0xff : __mmask8((1u << left) - 1), x + line * kLineColumns);
}

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  uint8_t* tail = row + values_bytes(m);
  for (int g = 0, l = 0; g < m.groups; ++g) {
    const int end = l + m.group_lines() < m.lines ? l + m.group_lines() : m.lines;
    for (; l < end; tail += 8) {
      const int from = l, to = l + kSegmentLines < end ? l + kSegmentLines : end;
      __m256 most = _mm256_setzero_ps(), nothing = _mm256_setzero_ps();
      for (l = from; l < to; ++l) {
        const __m256 v = load_line(m, x, l);
        most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v));
        nothing = _mm256_fmadd_ps(v, _mm256_setzero_ps(), nothing);  // 0, or NaN once a value is not finite
      }
      const float largest = max_lanes(most);
      // Below 1e-30 the inverse would overflow, and nothing that small matters.
      const __m256 inverse = _mm256_set1_ps(largest > 1e-30f ? 32767.0f / largest : 0.0f);
      __m256i sum = _mm256_setzero_si256();
      for (l = from; l < to; ++l) {
        const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(load_line(m, x, l), inverse));
        sum = _mm256_add_epi32(sum, q);
        const __m128i words = _mm256_cvtsepi32_epi16(q);
        _mm_store_si128(reinterpret_cast<__m128i*>(row) + l, _mm_shuffle_epi8(words, order));
      }
      const float scale = largest * (1.0f / 32767.0f) + sum_lanes(nothing);
      const int32_t total = sum_lanes(sum);
      __builtin_memcpy(tail, &scale, 4);
      __builtin_memcpy(tail + 4, &total, 4);
    }
  }
}

// The codes of two columns of 16 rows, as int16: columns (0, 2), (4, 6), (1, 3), (5, 7) for N = 0..3.
template <int N>
INT4MOE_INLINE __m512i pair_of(__m512i line) {
  if constexpr (N == 0) return _mm512_and_si512(line, _mm512_set1_epi16(15));
  if constexpr (N == 3) return _mm512_srli_epi16(line, 12);
  return _mm512_and_si512(_mm512_srli_epi16(line, 4 * N), _mm512_set1_epi16(15));
}

// acc += w * v, pairs of int16 to int32. Not the intrinsic: GCC 12 keeps sums of it in memory when they are many.
INT4MOE_INLINE void dot(__m512i& acc, __m512i w, __m512i v) {
  __asm__("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(v));
}

// Independent partial sums of one (block, token), so that few of them do not wait for each other.
template <int B, int M>
constexpr int kChains = B * M >= 4 ? 1 : B * M >= 2 ? 2 : 4;

template <int B, int M, int N, int C>
INT4MOE_INLINE void pairs(const __m512i (&line)[B], const uint8_t* const (&x)[M], size_t at, __m512i (&acc)[B][M][C]) {
  if constexpr (N < 4) {
    __m512i w[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) w[b] = pair_of<N>(line[b]);
#pragma GCC unroll 12
    for (int t = 0; t < M; ++t) {
      const __m512i v = _mm512_set1_epi32(int_at(x[t] + at + 4 * N));
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) dot(acc[b][t][N % C], w[b], v);
    }
    pairs<B, M, N + 1, C>(line, x, at, acc);
  }
}

struct Int16 {
  template <int B, int M>
  static void tile(const Matrix& m, int block, const uint8_t* const* rows, float* out, size_t out_stride,
                   const uint8_t* next) {
    const uint8_t *codes[B], *scales[B], *zeros[B];
    for (int b = 0; b < B; ++b) {
      codes[b] = m.block_codes(block + b);
      scales[b] = m.block_scales(block + b);
      zeros[b] = m.block_zeros(block + b);
    }
    const uint8_t* x[M];
    for (int t = 0; t < M; ++t) x[t] = rows[t];
    const Ahead fetch(m, codes[0], next);
    size_t tail = values_bytes(m);
    bool fresh = true;
    for (int g = 0, l = 0; g < m.groups; ++g) {
      const int end = l + m.group_lines() < m.lines ? l + m.group_lines() : m.lines;
      for (; l < end; tail += 8, fresh = false) {
        const int to = l + kSegmentLines < end ? l + kSegmentLines : end;
        constexpr int C = kChains<B, M>;
        __m512i acc[B][M][C];
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
          const __m512i z = load_zeros(zeros[b], g);
#pragma GCC unroll 12
          for (int t = 0; t < M; ++t) {
            const auto sum = uint32_t(int_at(x[t] + tail + 4));  // any value at all where an activation is not finite
            for (int c = 1; c < C; ++c) acc[b][t][c] = _mm512_setzero_si512();
            acc[b][t][0] = m.zeros ? _mm512_mullo_epi32(z, _mm512_set1_epi32(int32_t(0u - sum)))
                                     : _mm512_set1_epi32(int32_t(0u - 8u * sum));
          }
        }
        for (; l < to; ++l) {
          const ptrdiff_t ahead = fetch(l);
          __m512i line[B];
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) {
            line[b] = _mm512_load_si512(codes[b] + size_t(l) * kLineBytes);
            prefetch(codes[b] + ptrdiff_t(l) * kLineBytes + ahead);
          }
          pairs<B, M, 0, C>(line, x, size_t(l) * kLineColumns * 2, acc);
        }
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
          const __m512 s = load_scales(m, scales[b], g);
#pragma GCC unroll 12
          for (int t = 0; t < M; ++t) {
            for (int c = 1; c < C; ++c) acc[b][t][0] = _mm512_add_epi32(acc[b][t][0], acc[b][t][c]);
            float* total = out + t * out_stride + b * kBlockRows;
            const __m512 before = fresh ? _mm512_setzero_ps() : _mm512_load_ps(total);
            const __m512 scale = _mm512_mul_ps(s, _mm512_set1_ps(float_at(x[t] + tail)));
            _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[b][t][0]), scale, before));
          }
        }
      }
    }
  }
};

}  // namespace
}  // namespace avx512

#define INT4MOE_ROW(ISA, FEATURES, TYPES)                                                                    \
  {                                                                                                          \
    ISA, "w4a16", FEATURES, avx512::kTile, avx512::row_bytes, avx512::prepare,                               \
        avx512::Tiled<avx512::Int16>::multiply, avx512::activate, avx512::load, avx512::store,               \
        avx512::accumulate, TYPES                                                                            \
  }

// On a CPU with AMX this is also what float16 activations take: tiles would round them to bfloat16.
extern const Kernels kAvx512Int16W4A16, kAmxInt16W4A16;
const Kernels kAvx512Int16W4A16 = INT4MOE_ROW("avx512", kAvx512 | kAvx512Vnni,
                                              type_bit(FloatType::kBFloat16) | type_bit(FloatType::kFloat16));
const Kernels kAmxInt16W4A16 = INT4MOE_ROW("amx", kAvx512 | kAvx512Vnni | kAmxTile, type_bit(FloatType::kFloat16));

}  // namespace int4moe
