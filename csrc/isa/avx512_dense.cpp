// Dense linears with vectors of 16 floats.
#include <immintrin.h>

#include <algorithm>

#include "core/compact.h"
#include "isa/dense_kernels.h"
#include "isa/float_bits.h"

#define INT4MOE_UNROLL _Pragma("GCC unroll 16")
#define INT4MOE_INLINE inline __attribute__((always_inline))

namespace int4moe {
namespace avx512 {
namespace {

struct Vector {
  using Type = __m512;
  using Words = __m512i;
  static constexpr int kLanes = 16, kTile = 4, kTogether = 3;  // 24 sums, 3 vectors of weights, one of activations: 32 registers
  static constexpr int kFew = 3, kCompactFew = 4;              // measured

  static Type zero() { return _mm512_setzero_ps(); }
  static Type set1(float v) { return _mm512_set1_ps(v); }
  static Type mul(Type a, Type b) { return _mm512_mul_ps(a, b); }
  static Type fma(Type a, Type b, Type c) { return _mm512_fmadd_ps(a, b, c); }
  static Type load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, Type v) { _mm512_store_ps(p, v); }

  static Words load_words(const uint16_t* p) { return _mm512_loadu_si512(p); }
  static void store_words(uint16_t* p, Words v) { _mm512_store_si512(p, v); }
  static Type even(Words v) { return _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)); }
  static Type odd(Words v) { return _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(int(0xffff0000u)))); }

  // 12 bits at the top of each word as bfloat16.
  static Words widened(Words v) { return _mm512_and_si512(_mm512_srai_epi16(v, 4), _mm512_set1_epi16(short(0x87ff))); }
  static Words lowest(Words v) { return _mm512_slli_epi16(v, 12); }
  // Puts the lowest four bits of `words` at bit `at` of `rest`.
  static Words join(Words rest, Words words, int at) {
    return _mm512_or_si512(rest, _mm512_slli_epi16(_mm512_and_si512(words, _mm512_set1_epi16(15)), at));
  }

  // Lanes that are equal modulo 8 first, as AVX2 adds them.
  static float total(const Type (&v)[2]) {
    const __m256 even = halves(v[0]), odd = halves(v[1]);
    const __m256 eight = _mm256_add_ps(even, odd);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }

 private:
  static __m256 halves(Type v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
};

#include "isa/dense_rows.h"

}  // namespace
}  // namespace avx512

const DenseKernels kAvx512Dense = {avx512::prepare, avx512::rows};

}  // namespace int4moe
