// W4A16 on AVX512-BF16, for activations that are bfloat16 already: dot products of pairs, accumulated in float32.
//
// A table look-up turns the nibble of a 16-bit lane into bfloat16 (code - 8), exactly; one covers two columns of 16 rows.
// `prepare` orders the activations to match. The intermediate activations of a layer are rounded to bfloat16 as well.
// Order of arithmetic for one (row, token), the same for every tile size: within a group one chain from
// (8 - zero) * (sum of the group's x), line by line, four dot products each; then one fused multiply-add of the group's
// scale into the total, group by group.
#include "core/cpu_features.h"
#include "isa/avx512_common.h"

namespace int4moe {
namespace avx512 {
namespace {

// A row: bfloat16 [lines * 8], each line in the order 0 2 4 6 1 3 5 7; float sum [groups].
size_t sums_at(const Matrix& m) { return size_t(m.lines) * kLineColumns * 2; }

size_t row_bytes(const Matrix& m) { return ((sums_at(m) + 4 * size_t(m.groups) + 63) / 64 | 1) * 64; }

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  for (int g = 0; g < m.groups; ++g) {
    __m256 sum = _mm256_setzero_ps();
    const int from = g * m.group_lines(), to = from + m.group_lines() < m.lines ? from + m.group_lines() : m.lines;
    for (int l = from; l < to; ++l) {
      const int at = l * kLineColumns, left = m.columns - at;
      const __m256 v = _mm256_maskz_loadu_ps(left >= 8 ? 0xff : __mmask8((1u << left) - 1), x + at);
      const __m128i h = (__m128i)_mm256_cvtneps_pbh(v);
      sum = _mm256_add_ps(sum, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
      _mm_store_si128(reinterpret_cast<__m128i*>(row + size_t(at) * 2), _mm_shuffle_epi8(h, order));
    }
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
    const float total = _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
    __builtin_memcpy(row + sums_at(m) + 4 * size_t(g), &total, 4);
  }
}

// bfloat16 of code - 8 for the low 4 bits of a 5-bit index.
INT4MOE_INLINE __m512i table() {
  alignas(64) uint16_t values[32];
  for (int i = 0; i < 32; ++i) {
    const float f = float((i & 15) - 8);
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    values[i] = uint16_t(u >> 16);
  }
  return _mm512_load_si512(values);
}

template <int B, int M, int N>
INT4MOE_INLINE void pairs(const __m512i (&line)[B], __m512i values, const uint8_t* const (&x)[M], size_t at,
                          __m512 (&acc)[B][M]) {
  if constexpr (N < 4) {
    __m512i w[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) w[b] = _mm512_permutexvar_epi16(N ? _mm512_srli_epi16(line[b], 4 * N) : line[b], values);
#pragma GCC unroll 12
    for (int t = 0; t < M; ++t) {
      const __m512i v = _mm512_set1_epi32(int_at(x[t] + at + 4 * N));
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) acc[b][t] = _mm512_dpbf16_ps(acc[b][t], (__m512bh)w[b], (__m512bh)v);
    }
    pairs<B, M, N + 1>(line, values, x, at, acc);
  }
}

struct BFloat16 {
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
    const Ahead fetch(m, codes[0], next);
    const __m512i values = table();

    const int group_lines = m.group_lines();
    for (int g = 0, l = 0; g < m.groups; ++g) {
      const int to = l + group_lines < m.lines ? l + group_lines : m.lines;
      __m512 acc[B][M];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const __m512 z = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_set1_epi32(8), load_zeros(zeros[b], g)));
#pragma GCC unroll 12
        for (int t = 0; t < M; ++t) {
          acc[b][t] = zeros[b] ? _mm512_mul_ps(z, _mm512_set1_ps(float_at(x[t] + sums_at(m) + 4 * size_t(g))))
                               : _mm512_setzero_ps();
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
        pairs<B, M, 0>(line, values, x, size_t(l) * kLineColumns * 2, acc);
      }
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const __m512 s = load_scales(m, scales[b], g);
#pragma GCC unroll 12
        for (int t = 0; t < M; ++t) {
          float* total = out + t * out_stride + b * kBlockRows;
          const __m512 before = g ? _mm512_load_ps(total) : _mm512_setzero_ps();
          _mm512_store_ps(total, _mm512_fmadd_ps(acc[b][t], s, before));
        }
      }
    }
  }
};

}  // namespace
}  // namespace avx512

extern const Kernels kAvx512Bf16W4A16;
const Kernels kAvx512Bf16W4A16 = {"avx512",         "w4a16",          kAvx512 | kAvx512Bf16, avx512::kTile,
                                  avx512::row_bytes, avx512::prepare, avx512::Tiled<avx512::BFloat16>::multiply,      avx512::activate,
                                  avx512::load,     avx512::store,    avx512::accumulate,
                                  type_bit(FloatType::kBFloat16)};

}  // namespace int4moe
