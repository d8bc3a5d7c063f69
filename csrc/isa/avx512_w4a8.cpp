// W4A8 on AVX-512 VNNI: codes 0..15 (unsigned) times int8 activations, four products to an int32 lane in one
// instruction. See w4a8_rows512.h for the order of arithmetic.
#include "core/cpu_features.h"
#include "isa/w4a8_rows512.h"

namespace int4moe {
namespace avx512 {
namespace {

// acc += codes * x, four products to a lane. Not the intrinsic: GCC 12 keeps sums of it in
// memory when they are many.
INT4MOE_INLINE void dot(__m512i& acc, __m512i codes, __m512i x) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(codes), "v"(x));
}

template <int B, int M>
using Totals = Vectors<B, M, 2 * B * M <= 24>;

// The sums of a segment of group g into the totals.
template <int B, int M, bool kHead, bool kZeros>
INT4MOE_INLINE void add(const Matrix& m, const uint8_t* const (&scales)[B], const uint8_t* const (&zeros)[B], int g,
                        const uint8_t* const (&x)[M], size_t scale_at, size_t sum_at, const __m512i (&acc)[B][M],
                        Totals<B, M>& total) {
#pragma GCC unroll 4
  for (int b = 0; b < B; ++b) {
    const W4A8Group group = w4a8_group(m, scales[b], zeros[b], g);
#pragma GCC unroll 12
    for (int t = 0; t < M; ++t) {
      const float scale = float_at(x[t] + scale_at), sum = float_at(x[t] + sum_at);
      total.set(b, t, w4a8_add<kHead, kZeros>(group, acc[b][t], scale, sum, total.get(b, t)));
    }
  }
}

struct Int8 {
  static constexpr int kTokens = 12;
  static constexpr int blocks(int tokens) { return tokens > 5 ? 2 : 1; }

  template <int B, int M>
  static void tile(const Matrix& m, int block, const uint8_t* const* rows, float* out, size_t out_stride, const uint8_t* next) {
    const uint8_t *codes[B], *scales[B], *zeros[B];
    for (int b = 0; b < B; ++b) {
      codes[b] = m.block_codes(block + b);
      scales[b] = m.block_scales(block + b);
      zeros[b] = m.block_zeros(block + b);
    }
    const uint8_t* x[M];
    for (int t = 0; t < M; ++t) x[t] = rows[t];
    const Ahead fetch(m, codes[0], next, B);
    const __m512i mask = _mm512_set1_epi8(15);

    Totals<B, M> total(out, out_stride);
    total.clear();
    const int group_lines = m.group_lines(), segment_lines = w4a8_segment_lines(m);
    size_t scale_at = w4a8_scales(m), sum_at = w4a8_sums(m);
    for (int g = 0, l = 0; g < m.groups; ++g, sum_at += 4) {
      const int end = l + group_lines < m.lines ? l + group_lines : m.lines;
      for (bool head = true; l < end; head = false, scale_at += 4) {
        const int to = l + segment_lines < end ? l + segment_lines : end;
        constexpr bool kTwo = B * M <= 5;  // chains, so that few sums do not wait for each other
        __m512i acc[B][M], more[B][M];
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
#pragma GCC unroll 12
          for (int t = 0; t < M; ++t) acc[b][t] = more[b][t] = _mm512_setzero_si512();
        }
        for (; l < to; ++l) {
          const ptrdiff_t ahead = fetch(l);
          __m512i low[B], high[B];
#pragma GCC unroll 4
          for (int b = 0; b < B; ++b) {
            const __m512i line = _mm512_load_si512(codes[b] + size_t(l) * kLineBytes);
            prefetch(codes[b] + ptrdiff_t(l) * kLineBytes + ahead);
            low[b] = _mm512_and_si512(line, mask);
            high[b] = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
          }
#pragma GCC unroll 12
          for (int t = 0; t < M; ++t) {
            const uint8_t* at = x[t] + size_t(l) * kLineColumns;
            const __m512i a = _mm512_set1_epi32(int_at(at)), c = _mm512_set1_epi32(int_at(at + 4));
#pragma GCC unroll 4
            for (int b = 0; b < B; ++b) {
              dot(acc[b][t], low[b], a);
              dot((kTwo ? more : acc)[b][t], high[b], c);
            }
          }
        }
        if constexpr (kTwo) {
          for (int b = 0; b < B; ++b) {
            for (int t = 0; t < M; ++t) acc[b][t] = _mm512_add_epi32(acc[b][t], more[b][t]);
          }
        }
        if (!head) {
          add<B, M, false, false>(m, scales, zeros, g, x, scale_at, sum_at, acc, total);
        } else if (!m.zeros) {
          add<B, M, true, false>(m, scales, zeros, g, x, scale_at, sum_at, acc, total);
        } else {
          add<B, M, true, true>(m, scales, zeros, g, x, scale_at, sum_at, acc, total);
        }
      }
    }
    total.store();
  }
};

}  // namespace

// Also for the AMX row, for few tokens.
void multiply_w4a8(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                   const uint8_t* next) {
  Tiled<Int8>::multiply(m, first, blocks, rows, out, out_stride, next);
}

}  // namespace avx512

extern const Kernels kAvx512W4A8;
const Kernels kAvx512W4A8 = {"avx512",
                             "w4a8",
                             kAvx512 | kAvx512Vnni,
                             avx512::Int8::kTokens,
                             avx512::w4a8_row_bytes,
                             avx512::w4a8_prepare,
                             avx512::multiply_w4a8,
                             avx512::activate,
                             avx512::load,
                             avx512::store,
                             avx512::accumulate};

}  // namespace int4moe
