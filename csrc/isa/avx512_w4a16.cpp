// W4A16 on AVX-512: float32 arithmetic on int4 codes.
//
// Codes are not shifted to the low bits: masked where they stand in their lane and converted, nibble n is
// code * 2^(4n), exactly, and `prepare` has multiplied the activation by 2^(-4n). (The top nibble would come out
// negative; that one is shifted.) Order of arithmetic for one (row, token), the same for every tile size: within a group
// one chain of fused multiply-adds from -zero * (sum of the group's x), line by line, nibble 0 to 7; then one fused
// multiply-add of the group's scale into the total, group by group.
#include "core/cpu_features.h"
#include "isa/avx512_common.h"

namespace int4moe {
namespace avx512 {
namespace {

// Column of nibble n within a line (see core/layout.h).
constexpr int column_of(int n) { return n % 2 * 4 + n / 2; }

// A row: float [lines * 8], float sum [groups].
size_t row_bytes(const Matrix& m) {
  const size_t lines = (size_t(m.lines) * kLineColumns + m.groups + 15) / 16;
  return (lines | 1) * 64;  // odd, so that rows of a tile do not fall into one set of the L1 cache
}

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  auto* values = reinterpret_cast<float*>(row);
  float* sums = values + size_t(m.lines) * kLineColumns;
  const __m256 fold = _mm256_setr_ps(1.0f, 0x1p-8f, 0x1p-16f, 0x1p-24f, 0x1p-4f, 0x1p-12f, 0x1p-20f, 1.0f);
  for (int g = 0; g < m.groups; ++g) {
    __m256 sum = _mm256_setzero_ps();
    const int from = g * m.group_lines(), to = from + m.group_lines() < m.lines ? from + m.group_lines() : m.lines;
    for (int l = from; l < to; ++l) {
      const int at = l * kLineColumns, left = m.columns - at;
      const __m256 v = _mm256_maskz_loadu_ps(left >= 8 ? 0xff : __mmask8((1u << left) - 1), x + at);
      sum = _mm256_add_ps(sum, v);
      _mm256_store_ps(values + at, _mm256_mul_ps(v, fold));
    }
    sums[g] = sum_lanes(sum);
  }
}

// Nibble N of every lane as float, times 2^(4N) (2^0 for the top one).
template <int N>
INT4MOE_INLINE __m512 nibble(__m512i line) {
  if constexpr (N == 7) {
    return _mm512_cvtepi32_ps(_mm512_srli_epi32(line, 28));
  } else {
    return _mm512_cvtepi32_ps(_mm512_and_si512(line, _mm512_set1_epi32(15 << (4 * N))));
  }
}

// acc += w * v. Not the intrinsic: GCC 12 keeps sums of it in memory when they are many.
INT4MOE_INLINE void multiply_add(__m512& acc, __m512 w, __m512 v) {
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(acc) : "v"(w), "v"(v));
}

template <int B, int M, int N>
INT4MOE_INLINE void nibbles(const __m512i (&line)[B], const float* const (&x)[M], size_t column, __m512 (&acc)[B][M]) {
  if constexpr (N < 8) {
    __m512 w[B];
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) w[b] = nibble<N>(line[b]);
#pragma GCC unroll 12
    for (int t = 0; t < M; ++t) {
      const __m512 v = _mm512_set1_ps(x[t][column + column_of(N)]);
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) multiply_add(acc[b][t], w[b], v);
    }
    nibbles<B, M, N + 1>(line, x, column, acc);
  }
}

struct Float {
  static constexpr int kTokens = 12;
  static constexpr int blocks(int tokens) { return tokens > 5 ? 2 : 4; }

  template <int B, int M>
  static void tile(const Matrix& m, int block, const uint8_t* const* rows, float* out, size_t out_stride, const uint8_t* next) {
    const uint8_t *codes[B], *scales[B], *zeros[B];
    for (int b = 0; b < B; ++b) {
      codes[b] = m.block_codes(block + b);
      scales[b] = m.block_scales(block + b);
      zeros[b] = m.block_zeros(block + b);
    }
    const float* x[M];
    for (int t = 0; t < M; ++t) x[t] = reinterpret_cast<const float*>(rows[t]);
    const size_t sums_at = size_t(m.lines) * kLineColumns;
    const Ahead fetch(m, codes[0], next, B);

    const int group_lines = m.group_lines();
    for (int g = 0, l = 0; g < m.groups; ++g) {
      const int to = l + group_lines < m.lines ? l + group_lines : m.lines;
      __m512 acc[B][M];
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) {
        const __m512 z = _mm512_cvtepi32_ps(load_zeros(zeros[b], g));
#pragma GCC unroll 12
        for (int t = 0; t < M; ++t) acc[b][t] = _mm512_mul_ps(z, _mm512_set1_ps(-x[t][sums_at + g]));
      }
      for (; l < to; ++l) {
        const ptrdiff_t ahead = fetch(l);
        __m512i line[B];
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
          line[b] = _mm512_load_si512(codes[b] + size_t(l) * kLineBytes);
          prefetch(codes[b] + ptrdiff_t(l) * kLineBytes + ahead);
        }
        nibbles<B, M, 0>(line, x, size_t(l) * kLineColumns, acc);
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

#define INT4MOE_ROW(ISA, FEATURES, TYPES)                                                                    \
  {                                                                                                          \
    ISA, "w4a16", FEATURES, avx512::Float::kTokens, avx512::row_bytes, avx512::prepare,                               \
        avx512::Tiled<avx512::Float>::multiply, avx512::activate, avx512::load, avx512::store,               \
        avx512::accumulate, TYPES                                                                            \
  }

// On a CPU with AMX this is also what float32 activations take: tiles have integers of 16 bits.
extern const Kernels kAvx512W4A16, kAmxFloatW4A16;
const Kernels kAvx512W4A16 = INT4MOE_ROW("avx512", kAvx512, 7);
const Kernels kAmxFloatW4A16 = INT4MOE_ROW("amx", kAvx512 | kAmxTile, type_bit(FloatType::kFloat32));

}  // namespace int4moe
