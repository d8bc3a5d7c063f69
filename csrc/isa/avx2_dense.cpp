// Dense linears with vectors of 8 floats.
#include "isa/avx2_dense.h"

#include <immintrin.h>

#include <algorithm>

#include "core/compact.h"
#include "isa/dense_kernels.h"
#include "isa/float_bits.h"

#define INT4MOE_UNROLL _Pragma("GCC unroll 16")
#define INT4MOE_INLINE inline __attribute__((always_inline))

namespace int4moe {
namespace avx2 {
namespace {

inline float sum_of(__m256 v) {
  const __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

struct Vector {
  using Type = __m256;
  using Words = __m256i;
  static constexpr int kLanes = 8, kTile = 3, kTogether = 1;  // 12 sums, a vector of weights taken apart: 16 registers
  static constexpr int kFew = 3, kCompactFew = 3;             // measured

  static Type zero() { return _mm256_setzero_ps(); }
  static Type set1(float v) { return _mm256_set1_ps(v); }
  static Type mul(Type a, Type b) { return _mm256_mul_ps(a, b); }
  static Type fma(Type a, Type b, Type c) { return _mm256_fmadd_ps(a, b, c); }
  static Type load(const float* p) { return _mm256_load_ps(p); }
  static void store(float* p, Type v) { _mm256_store_ps(p, v); }

  static Words load_words(const uint16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  static void store_words(uint16_t* p, Words v) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), v); }
  static Type even(Words v) { return _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)); }
  static Type odd(Words v) { return _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32(int(0xffff0000u)))); }

  // 12 bits at the top of each word as bfloat16.
  static Words widened(Words v) { return _mm256_and_si256(_mm256_srai_epi16(v, 4), _mm256_set1_epi16(short(0x87ff))); }
  static Words lowest(Words v) { return _mm256_slli_epi16(v, 12); }
  // Puts the lowest four bits of `words` at bit `at` of `rest`.
  static Words join(Words rest, Words words, int at) {
    return _mm256_or_si256(rest, _mm256_slli_epi16(_mm256_and_si256(words, _mm256_set1_epi16(15)), at));
  }

  static float total(const Type (&v)[4]) {
    return sum_of(_mm256_add_ps(_mm256_add_ps(v[0], v[2]), _mm256_add_ps(v[1], v[3])));
  }
};

#include "isa/dense_rows.h"

}  // namespace

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

const DenseKernels kAvx2Dense = {avx2::prepare, avx2::rows};

}  // namespace int4moe
