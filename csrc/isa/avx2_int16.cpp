// W4A16 on AVX2 for 16-bit activations: int16 values with one scale per token and segment, exact int32 sums.
//
// A bfloat16 or float16 activation x becomes round(x / s) with s = max|x| / 32767 over the segment, an error of 2^-16 of
// the largest; that is finer than the rounding of the result to 16 bits. One vpmaddwd takes two columns of 8 rows, where
// a float32 multiply-add takes one, and codes need no conversion. Sums of a segment are exact integers: any order gives
// the same bits. For one (row, token): total = fma(float(d), weight scale * s, total) with d = sum((code - zero) * x),
// segment by segment. A segment is a group, or a part of a group that is longer than kSegmentLines (for int32 to hold
// the sum).
#include "core/cpu_features.h"
#include "isa/avx2_tiles.h"

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kTile = 6;             // 12 sums, 2 vectors of codes, an activation and a product: 16 registers
constexpr int kSegmentLines = 128;   // 15 * 32767 * 1024 < 2^31
constexpr int kValueBytes = 2 * kLineColumns;

int segments_per_group(const Matrix& m) { return (m.group_lines() + kSegmentLines - 1) / kSegmentLines; }

size_t values_bytes(const Matrix& m) { return size_t(m.lines) * kValueBytes; }

// A row: int16 [lines * 8], each line in the order 0 2 4 6 1 3 5 7; then a Scaled for every segment.
size_t row_bytes(const Matrix& m) {
  const size_t segments = size_t(segments_per_group(m)) * size_t(m.groups);
  return ((values_bytes(m) + sizeof(Scaled) * segments + 63) / 64 | 1) * 64;
}

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  uint8_t* tail = row + values_bytes(m);
  for (int g = 0, l = 0; g < m.groups; ++g) {
    const int end = l + m.group_lines() < m.lines ? l + m.group_lines() : m.lines;
    for (; l < end; tail += sizeof(Scaled)) {
      const int from = l, to = l + kSegmentLines < end ? l + kSegmentLines : end;
      __m256 most = _mm256_setzero_ps(), nothing = _mm256_setzero_ps();
      for (l = from; l < to; ++l) {
        const __m256 v = load_line(m, x, l);
        most = _mm256_max_ps(most, abs_ps(v));
        nothing = _mm256_fmadd_ps(v, _mm256_setzero_ps(), nothing);  // 0, or NaN once a value is not finite
      }
      const float largest = max_lanes(most);
      // Below 1e-30 the inverse would overflow, and nothing that small matters.
      const __m256 inverse = _mm256_set1_ps(largest > 1e-30f ? 32767.0f / largest : 0.0f);
      __m256i minus = _mm256_setzero_si256();
      for (l = from; l < to; ++l) {
        const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(load_line(m, x, l), inverse));
        minus = _mm256_sub_epi32(minus, q);
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
        _mm_store_si128(reinterpret_cast<__m128i*>(row) + l, _mm_shuffle_epi8(words, order));
      }
      const Scaled scaled{largest * (1.0f / 32767.0f) + sum_lanes(nothing), sum_lanes(minus)};
      __builtin_memcpy(tail, &scaled, sizeof(scaled));
    }
  }
}

alignas(32) constexpr uint64_t kLowNibbles[4] = {0x000f000f000f000f, 0x000f000f000f000f, 0x000f000f000f000f, 0x000f000f000f000f};

// The codes of two columns of 8 rows, as int16: columns (0, 2), (4, 6), (1, 3), (5, 7) for N = 0..3.
template <int N>
INT4MOE_INLINE __m256i pair_of(const uint8_t* p) {
  const __m256i line = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  if constexpr (N == 0) return masked(line, kLowNibbles);
  if constexpr (N == 3) return _mm256_srli_epi16(line, 12);
  return masked(_mm256_srli_epi16(line, 4 * N), kLowNibbles);
}

// sum += w * v, in place: compilers add products first when they may, and then run out of registers.
INT4MOE_INLINE void multiply_add(__m256i& sum, __m256i w, __m256i v) {
  __m256i product;
  __asm__("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(v));
}

template <int M, int N>
INT4MOE_INLINE void pairs(const uint8_t* codes, const uint8_t* const (&x)[M], size_t at, __m256i (&sums)[M][2]) {
  if constexpr (N < 4) {
    const __m256i w0 = pair_of<N>(codes), w1 = pair_of<N>(codes + kLineBytes / 2);
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) {
      const __m256i v = broadcast4(x[t] + at + 4 * N);
      multiply_add(sums[t][0], w0, v);
      multiply_add(sums[t][1], w1, v);
    }
    // With many tokens there is no register to keep the codes in: they are loaded again for the next pair.
    if constexpr (M > 3) __asm__("" : "+r"(codes));
    pairs<M, N + 1>(codes, x, at, sums);
  }
}

// The codes of two columns of 8 rows, as int16; those of N = 1 (columns 4 and 6) stay where they are in their bytes, 16
// times as large.
template <int N>
INT4MOE_INLINE __m256i pair_in_place(__m256i line, __m256i low, __m256i high) {
  if constexpr (N == 0) return _mm256_and_si256(line, low);
  if constexpr (N == 1) return _mm256_and_si256(line, high);
  if constexpr (N == 2) return _mm256_and_si256(_mm256_srli_epi16(line, 8), low);
  return _mm256_srli_epi16(line, 12);
}

template <int M, int N>
INT4MOE_INLINE void pairs_in_place(__m256i line0, __m256i line1, __m256i low, __m256i high,
                                   const uint8_t* const (&x)[M], size_t at, __m256i (&sums)[M][2], __m256i (&sums16)[M][2]) {
  if constexpr (N < 4) {
    const __m256i w0 = pair_in_place<N>(line0, low, high), w1 = pair_in_place<N>(line1, low, high);
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) {
      const __m256i v = broadcast4(x[t] + at + 4 * N);
      auto& to = N == 1 ? sums16 : sums;
      multiply_add(to[t][0], w0, v);
      multiply_add(to[t][1], w1, v);
    }
    pairs_in_place<M, N + 1>(line0, line1, low, high, x, at, sums, sums16);
  }
}

// `lines` lines from `codes` on for one or two tokens, where decoding is what takes time: sums of 16 times the codes still
// fit in int32.
template <int M>
INT4MOE_INLINE void few_tokens(const uint8_t* codes, ptrdiff_t fetch, const uint8_t* const (&x)[M], size_t at, int lines,
                               __m256i (&sums)[M][2]) {
  static_assert(2 * 15 * 16 * 32767ll * kSegmentLines < 1ll << 31, "int32 sums");
  const __m256i low = _mm256_set1_epi16(0x0f), high = _mm256_set1_epi16(0xf0);
  __m256i sums16[M][2];
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) sums16[t][0] = sums16[t][1] = _mm256_setzero_si256();
#pragma GCC unroll 2
  for (int l = 0; l < lines; ++l, codes += kLineBytes, at += kValueBytes) {
    prefetch(codes + fetch);
    const auto* line = reinterpret_cast<const __m256i*>(codes);
    pairs_in_place<M, 0>(_mm256_load_si256(line), _mm256_load_si256(line + 1), low, high, x, at, sums, sums16);
  }
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    sums[t][0] = _mm256_add_epi32(sums[t][0], _mm256_srai_epi32(sums16[t][0], 4));
    sums[t][1] = _mm256_add_epi32(sums[t][1], _mm256_srai_epi32(sums16[t][1], 4));
  }
}

struct Int16 {
  static constexpr int kTokens = kTile;

  template <int M, ScaleType S>
  static void tile(const Matrix& m, const Block& b, const uint8_t* const* rows, float* out, size_t out_stride) {
    const uint8_t* x[M];
    __m256 total[M][2];
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) {
      x[t] = rows[t];
      total[t][0] = total[t][1] = _mm256_setzero_ps();
    }
    const int group_lines = m.group_lines();
    size_t scaled_at = values_bytes(m);
    for (int g = 0, l = 0; g < m.groups; ++g) {
      const int end = l + group_lines < m.lines ? l + group_lines : m.lines;
      for (; l < end; scaled_at += sizeof(Scaled)) {
        const int to = l + kSegmentLines < end ? l + kSegmentLines : end;
        __m256i sums[M][2];
        start_sums<M>(b, g, x, scaled_at, sums);
        const uint8_t* codes = b.codes + size_t(l) * kLineBytes;
        const ptrdiff_t fetch = to_fetch(b, codes);
        size_t at = size_t(l) * kValueBytes;
        if constexpr (M <= 2) {
          few_tokens<M>(codes, fetch, x, at, to - l, sums);
          l = to;
        } else {
          for (; l < to; ++l, codes += kLineBytes, at += kValueBytes) {
            prefetch(codes + fetch);
            pairs<M, 0>(codes, x, at, sums);
          }
        }
        add_scaled<M, S>(b, g, x, scaled_at, sums, total);
      }
    }
    store_rows<M>(total, out, out_stride);
  }
};

}  // namespace
}  // namespace avx2

extern const Kernels kAvx2Int16W4A16;
const Kernels kAvx2Int16W4A16 = {"avx2",
                                 "w4a16",
                                 kAvx2,
                                 avx2::kTile,
                                 avx2::row_bytes,
                                 avx2::prepare,
                                 avx2::Tiled<avx2::Int16>::multiply,
                                 avx2::activate,
                                 avx2::load,
                                 avx2::store,
                                 avx2::accumulate,
                                 type_bit(FloatType::kBFloat16) | type_bit(FloatType::kFloat16)};

}  // namespace int4moe
