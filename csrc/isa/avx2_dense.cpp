#include "isa/avx2_dense.h"

#include <immintrin.h>

#include "isa/float_bits.h"

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kTile = 3;       // tokens: 12 sums, a vector of weights taken apart: 16 registers
constexpr int64_t kRows = 16;  // of weights that stay in a cache for all tokens

inline float sum_of(__m256 v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

template <int T>
void rows_of(int64_t first, int64_t last, int64_t rows, int64_t columns, const float* x, const uint16_t* w,
             const uint16_t* bias, uint16_t* y, int64_t ahead) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
  for (int64_t n = first; n < last; ++n) {
    const uint16_t* row = w + n * columns;
    __m256 acc[T][4];
    for (int t = 0; t < T; ++t) acc[t][0] = acc[t][1] = acc[t][2] = acc[t][3] = _mm256_setzero_ps();
    for (int64_t k = 0; k < columns; k += 32) {
      __asm__ volatile("prefetcht1 %0" : : "m"(row[k + ahead]));
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + k + 16 * half));
        const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16));
        const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(v, high));
#pragma GCC unroll 4
        for (int t = 0; t < T; ++t) {
          const float* xt = x + t * columns + k + 16 * half;
          acc[t][2 * half] = _mm256_fmadd_ps(even, _mm256_load_ps(xt), acc[t][2 * half]);
          acc[t][2 * half + 1] = _mm256_fmadd_ps(odd, _mm256_load_ps(xt + 8), acc[t][2 * half + 1]);
        }
      }
    }
    for (int t = 0; t < T; ++t) {
      const float sum = sum_of(_mm256_add_ps(_mm256_add_ps(acc[t][0], acc[t][2]), _mm256_add_ps(acc[t][1], acc[t][3])));
      y[t * rows + n] = float_to_bf16(bias ? sum + bf16_to_float(bias[n]) : sum);
    }
  }
}

}  // namespace

void widen(int64_t count, const uint16_t* x, float* dst) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
  for (int64_t i = 0; i < count; i += 16) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    _mm256_store_ps(dst + i, _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)));
    _mm256_store_ps(dst + i + 8, _mm256_castsi256_ps(_mm256_and_si256(v, high)));
  }
}

void dense_rows(int tokens, int64_t first, int64_t last, int64_t rows, int64_t columns, const float* x, const uint16_t* w,
                const uint16_t* bias, uint16_t* y) {
  constexpr decltype(&rows_of<1>) kBySize[kTile + 1] = {nullptr, rows_of<1>, rows_of<2>, rows_of<kTile>};
  for (int64_t n = first, end; n < last; n = end) {
    end = tokens > kTile && n + kRows < last ? n + kRows : last;
    for (int from = 0; from < tokens; from += kTile) {
      const auto fn = kBySize[tokens - from < kTile ? tokens - from : kTile];
      // The next block comes from memory while the last tile computes.
      const int64_t ahead = tokens > kTile && from + kTile >= tokens ? kRows * columns : 0;
      fn(n, end, rows, columns, x + from * columns, w, bias, y + from * rows, ahead);
    }
  }
}

void float_rows(int tokens, int64_t first, int64_t last, int64_t rows, int64_t columns, const uint16_t* x, const float* w,
                float* y) {
  for (int64_t n = first; n < last; ++n) {
    const float* row = w + n * columns;
    for (int t = 0; t < tokens; ++t) {
      __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
      for (int64_t k = 0; k < columns; k += 32) {
        const auto* from = reinterpret_cast<const __m128i*>(x + t * columns + k);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const __m256i v = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from + i)), 16);
          acc[i] = _mm256_fmadd_ps(_mm256_castsi256_ps(v), _mm256_loadu_ps(row + k + 8 * i), acc[i]);
        }
      }
      y[t * rows + n] = sum_of(_mm256_add_ps(_mm256_add_ps(acc[0], acc[2]), _mm256_add_ps(acc[1], acc[3])));
    }
  }
}

}  // namespace avx2
}  // namespace int4moe
