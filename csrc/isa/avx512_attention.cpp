// Attention with vectors of 16 floats.
#include <algorithm>
#include <utility>

#pragma GCC diagnostic ignored "-Wunused-function"
#include "isa/attention_kernels.h"
#include "isa/avx512_common.h"

#define INT4MOE_UNROLL _Pragma("GCC unroll 16")

namespace int4moe {
namespace avx512 {
namespace {

struct Vector {
  using Type = __m512;
  static constexpr int kLanes = 16, kRowTile = 12;  // 24 sums, 2 vectors and a factor: 32 registers

  static Type load(const float* p) { return _mm512_load_ps(p); }
  static Type load8(const float* p) { return _mm512_broadcast_f32x8(_mm256_load_ps(p)); }
  static void store(float* p, Type v) { _mm512_store_ps(p, v); }
  static void store8(float* p, Type v) { _mm256_store_ps(p, _mm512_castps512_ps256(v)); }
  static Type zero() { return _mm512_setzero_ps(); }
  static Type set1(float v) { return _mm512_set1_ps(v); }
  static Type add(Type a, Type b) { return _mm512_add_ps(a, b); }
  static Type sub(Type a, Type b) { return _mm512_sub_ps(a, b); }
  static Type mul(Type a, Type b) { return _mm512_mul_ps(a, b); }
  static Type fma(Type a, Type b, Type c) { return _mm512_fmadd_ps(a, b, c); }
  static Type max(Type a, Type b) { return _mm512_max_ps(a, b); }  // b where one is NaN
  static Type exp(Type v) { return exp_ps(v); }
  static float first(Type v) { return _mm512_cvtss_f32(v); }
  static float max_lanes(Type v) {
    return avx512::max_lanes(_mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }
  static float sum_lanes(Type v) {
    return avx512::sum_lanes(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
  }
  static bool all_one(Type v) { return !_mm512_cmp_ps_mask(v, set1(1.0f), _CMP_NEQ_UQ); }
  static Type zero_where_equal(Type v, Type x, float to) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(to), _CMP_NEQ_UQ), v);
  }

  struct Two {
    Type first, second;
  };

  template <FloatType T>
  static INT4MOE_INLINE Two pair(const void* p, int64_t at) {
    if constexpr (T == FloatType::kFloat32) {
      const float* f = static_cast<const float*>(p) + at;
      return {_mm512_loadu_ps(f), _mm512_loadu_ps(f + 16)};
    } else {
      const __m512i bits = _mm512_loadu_si512(static_cast<const uint16_t*>(p) + at);
      return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)),
              _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xffff0000u))))};
    }
  }

  // Back to the order of elements.
  template <FloatType T>
  static INT4MOE_INLINE void unpair(float* dst, Type first, Type second) {
    if constexpr (T == FloatType::kFloat32) {
      store(dst, first);
      store(dst + 16, second);
    } else {
      const Type low = _mm512_unpacklo_ps(first, second), high = _mm512_unpackhi_ps(first, second);
      const __m512i begin = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
      store(dst, _mm512_permutex2var_ps(low, begin, high));
      store(dst + 16, _mm512_permutex2var_ps(low, _mm512_add_epi32(begin, _mm512_set1_epi32(8)), high));
    }
  }

  // Lane i: the sum over the lanes of v[i].
  static INT4MOE_INLINE Type sums_of_lanes(const Type (&v)[16]) {
    Type pairs[8], fours[4], eights[2];
    INT4MOE_UNROLL
    for (int i = 0; i < 8; ++i) {
      pairs[i] = add(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
    INT4MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      fours[i] = add(_mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
                     _mm512_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee));
    }
    INT4MOE_UNROLL
    for (int i = 0; i < 2; ++i) eights[i] = quarters(fours[2 * i], fours[2 * i + 1]);
    return quarters(eights[0], eights[1]);
  }

  // Lanes that are equal modulo P joined, in all of them.
  template <int P, class Join>
  static INT4MOE_INLINE Type every(Type v, Join join) {
    v = join(v, _mm512_shuffle_f32x4(v, v, 0x4e));
    if constexpr (P <= 4) v = join(v, _mm512_shuffle_f32x4(v, v, 0xb1));
    if constexpr (P <= 2) v = join(v, _mm512_permute_ps(v, 0x4e));
    if constexpr (P == 1) v = join(v, _mm512_permute_ps(v, 0xb1));
    return v;
  }

 private:
  // Quarters 0 + 1 and 2 + 3 of a, then those of b.
  static INT4MOE_INLINE Type quarters(Type a, Type b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
};

#include "isa/attention_rows.h"

#include "isa/attention_one.h"

}  // namespace
}  // namespace avx512

const AttentionKernels kAvx512Attention = {avx512::attend, avx512::attend_run, avx512::join_runs};

}  // namespace int4moe
