// Attention with vectors of 8 floats.
#include <algorithm>
#include <utility>

#pragma GCC diagnostic ignored "-Wunused-function"
#include "isa/attention_kernels.h"
#include "isa/avx2_common.h"

namespace int4moe {
namespace avx2 {
namespace {

struct Vector {
  using Type = __m256;
  static constexpr int kLanes = 8, kRowTile = 6;  // 12 sums, 2 vectors and a factor: 16 registers

  static Type load(const float* p) { return _mm256_load_ps(p); }
  static Type load8(const float* p) { return _mm256_load_ps(p); }
  static void store(float* p, Type v) { _mm256_store_ps(p, v); }
  static void store8(float* p, Type v) { _mm256_store_ps(p, v); }
  static Type zero() { return _mm256_setzero_ps(); }
  static Type set1(float v) { return _mm256_set1_ps(v); }
  static Type add(Type a, Type b) { return _mm256_add_ps(a, b); }
  static Type sub(Type a, Type b) { return _mm256_sub_ps(a, b); }
  static Type mul(Type a, Type b) { return _mm256_mul_ps(a, b); }
  static Type fma(Type a, Type b, Type c) { return _mm256_fmadd_ps(a, b, c); }
  static Type max(Type a, Type b) { return _mm256_max_ps(a, b); }  // b where one is NaN
  static Type exp(Type v) { return exp_ps(v); }
  static float first(Type v) { return _mm256_cvtss_f32(v); }
  static float max_lanes(Type v) { return avx2::max_lanes(v); }
  static float sum_lanes(Type v) { return avx2::sum_lanes(v); }
  static bool all_one(Type v) { return !_mm256_movemask_ps(_mm256_cmp_ps(v, set1(1.0f), _CMP_NEQ_UQ)); }
  static Type zero_where_equal(Type v, Type x, float to) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, set1(to), _CMP_EQ_OQ), v);
  }

  struct Two {
    Type first, second;
  };

  template <FloatType T>
  static INT4MOE_INLINE Two pair(const void* p, int64_t at) {
    if constexpr (T == FloatType::kFloat32) {
      const float* f = static_cast<const float*>(p) + at;
      return {_mm256_loadu_ps(f), _mm256_loadu_ps(f + 8)};
    } else {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(p) + at));
      return {_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)),
              _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(int(0xffff0000u))))};
    }
  }

  // Back to the order of elements.
  template <FloatType T>
  static INT4MOE_INLINE void unpair(float* dst, Type first, Type second) {
    if constexpr (T == FloatType::kFloat32) {
      store(dst, first);
      store(dst + 8, second);
    } else {
      const Type low = _mm256_unpacklo_ps(first, second), high = _mm256_unpackhi_ps(first, second);
      store(dst, _mm256_permute2f128_ps(low, high, 0x20));
      store(dst + 8, _mm256_permute2f128_ps(low, high, 0x31));
    }
  }

  // Lane i: the sum over the lanes of v[i].
  static INT4MOE_INLINE Type sums_of_lanes(const Type (&v)[8]) {
    Type pairs[4], fours[2];
    INT4MOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      pairs[i] = add(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
    INT4MOE_UNROLL
    for (int i = 0; i < 2; ++i) {
      fours[i] = add(_mm256_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0x44),
                     _mm256_shuffle_ps(pairs[2 * i], pairs[2 * i + 1], 0xee));
    }
    return add(_mm256_permute2f128_ps(fours[0], fours[1], 0x20), _mm256_permute2f128_ps(fours[0], fours[1], 0x31));
  }

  // Lanes that are equal modulo P joined, in all of them.
  template <int P, class Join>
  static INT4MOE_INLINE Type every(Type v, Join join) {
    if constexpr (P <= 4) v = join(v, _mm256_permute2f128_ps(v, v, 1));
    if constexpr (P <= 2) v = join(v, _mm256_permute_ps(v, 0x4e));
    if constexpr (P == 1) v = join(v, _mm256_permute_ps(v, 0xb1));
    return v;
  }
};

#include "isa/attention_rows.h"

#include "isa/attention_one.h"

}  // namespace
}  // namespace avx2

const AttentionKernels kAvx2Attention = {avx2::attend, avx2::attend_run, avx2::join_runs};

}  // namespace int4moe
