// W4A16 on AVX-512 VNNI, for 16-bit activations: int16 values with one scale per token and stretch, exact int32 sums
// (int16_rows512.h says what is computed).
//
// One instruction takes two columns of 16 rows, where float32 takes one, and needs no conversion.
#include "core/cpu_features.h"
#include "isa/int16_rows512.h"

namespace int4moe {
namespace avx512 {
namespace {

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
constexpr int kChains = B * M >= 10 ? 1 : B * M >= 4 ? 2 : 4;

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
  static constexpr int kTokens = 6;
  static constexpr int blocks(int tokens) { return tokens > 3 ? 2 : tokens > 2 ? 4 : 1; }

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
    const Ahead fetch(m, codes[0], next, B);
    size_t tail = int16_values_bytes(m);
    alignas(64) float parts[M][B * kBlockRows];
    Vectors<B, M, B * M <= 5> total(out, out_stride);
    Vectors<B, M, B * M <= 12> part(parts[0], B * kBlockRows);
    total.clear();
    const int stretch = int16_groups_per_stretch(m);
    for (int g = 0, l = 0, left = stretch; g < m.groups; ++g) {
      const int end = l + m.group_lines() < m.lines ? l + m.group_lines() : m.lines;
      for (; l < end; tail += 8) {
        const int to = l + kInt16SegmentLines < end ? l + kInt16SegmentLines : end;
        constexpr int C = kChains<B, M>;
        __m512i acc[B][M][C];
#pragma GCC unroll 12
        for (int t = 0; t < M; ++t) {
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) {
            acc[b][t][0] = _mm512_set1_epi32(int_at(x[t] + tail + 4));
            for (int c = 1; c < C; ++c) acc[b][t][c] = _mm512_setzero_si512();
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
        const bool begins = left == stretch, ends = --left == 0 || l == m.lines;
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
          const __m512 s = load_scales(m, scales[b], g);
          if (m.zeros) {
            const __m512i offset = _mm512_sub_epi32(load_zeros(zeros[b], g), _mm512_set1_epi32(8));
#pragma GCC unroll 12
            for (int t = 0; t < M; ++t) {
              const __m512i minus = _mm512_srai_epi32(_mm512_set1_epi32(int_at(x[t] + tail + 4)), 3);
              acc[b][t][0] = _mm512_add_epi32(acc[b][t][0], _mm512_mullo_epi32(offset, minus));
            }
          }
#pragma GCC unroll 12
          for (int t = 0; t < M; ++t) {
            for (int c = 1; c < C; ++c) acc[b][t][0] = _mm512_add_epi32(acc[b][t][0], acc[b][t][c]);
            const __m512 d = _mm512_cvtepi32_ps(acc[b][t][0]);
            part.set(b, t, begins ? _mm512_mul_ps(d, s) : _mm512_fmadd_ps(d, s, part.get(b, t)));
          }
        }
        if (!ends) continue;
        left = stretch;
#pragma GCC unroll 12
        for (int t = 0; t < M; ++t) {
          const __m512 scale = _mm512_set1_ps(float_at(x[t] + tail));
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) total.set(b, t, _mm512_fmadd_ps(part.get(b, t), scale, total.get(b, t)));
        }
      }
    }
    total.store();
  }
};

}  // namespace

// Also for the AMX row, for few tokens.
void multiply_int16(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                    const uint8_t* next) {
  Tiled<Int16>::multiply(m, first, blocks, rows, out, out_stride, next);
}

}  // namespace avx512

extern const Kernels kAvx512Int16W4A16;
const Kernels kAvx512Int16W4A16 = {"avx512",
                                   "w4a16",
                                   kAvx512 | kAvx512Vnni,
                                   avx512::Int16::kTokens,
                                   avx512::int16_row_bytes,
                                   avx512::int16_prepare,
                                   avx512::multiply_int16,
                                   avx512::activate,
                                   avx512::load,
                                   avx512::store,
                                   avx512::accumulate,
                                   type_bit(FloatType::kBFloat16) | type_bit(FloatType::kFloat16)};

}  // namespace int4moe
