// W4A8 on AVX2: int8 activations, one scale per token and group, int8 dot products.
//
// Codes 0..15 times activations -127..127: the sum of 16 such products fits in int16 (30480), so four lines go through
// vpmaddubsw and 16-bit additions before one vpmaddwd widens to int32. Integer sums are exact; the result of a
// (row, token) is total = fma(float(d), weight scale * activation scale, total) with d = sum((code - zero) * x), group by
// group.
#include "core/cpu_features.h"
#include "isa/avx2_tiles.h"

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kTile = 6;  // 12 sums, 2 vectors of codes, an activation and a product: 16 registers
constexpr int kChunk = 4;  // lines whose products fit in int16 sums

size_t values_bytes(const Matrix& m) { return size_t(m.lines) * kLineColumns; }

// A row: int8 [lines * 8], then a Scaled for every group.
size_t row_bytes(const Matrix& m) {
  return ((values_bytes(m) + sizeof(Scaled) * size_t(m.groups) + 63) / 64 | 1) * 64;
}

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  uint8_t* tail = row + values_bytes(m);
  const int group_lines = m.group_lines();
  for (int g = 0; g < m.groups; ++g, tail += sizeof(Scaled)) {
    const int from = g * group_lines, to = from + group_lines < m.lines ? from + group_lines : m.lines;
    __m256 most = _mm256_setzero_ps(), nothing = _mm256_setzero_ps();
    for (int l = from; l < to; ++l) {
      const __m256 v = load_line(m, x, l);
      most = _mm256_max_ps(most, abs_ps(v));
      nothing = _mm256_fmadd_ps(v, _mm256_setzero_ps(), nothing);  // 0, or NaN once a value is not finite
    }
    const float largest = max_lanes(most);
    // Below 1e-30 the inverse would overflow, and nothing that small matters.
    const __m256 inverse = _mm256_set1_ps(largest > 1e-30f ? 127.0f / largest : 0.0f);
    __m256i minus = _mm256_setzero_si256();
    for (int l = from; l < to; ++l) {
      const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(load_line(m, x, l), inverse));
      minus = _mm256_sub_epi32(minus, q);
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(row + size_t(l) * kLineColumns), _mm_packs_epi16(words, words));
    }
    const Scaled scaled{largest * (1.0f / 127.0f) + sum_lanes(nothing), sum_lanes(minus)};
    __builtin_memcpy(tail, &scaled, sizeof(scaled));
  }
}

alignas(32) constexpr uint64_t kLowNibbles[4] = {0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f};

// The codes of columns 0-3 (N = 0) or 4-7 (N = 1) of 8 rows.
template <int N>
INT4MOE_INLINE __m256i half_line(const uint8_t* p) {
  const __m256i line = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  return masked(N == 0 ? line : _mm256_srli_epi16(line, 4), kLowNibbles);
}

#ifndef INT4MOE_AVX_VNNI
// sum += w * v in 16 bits, in place: compilers add products first when they may, and then run out of registers.
INT4MOE_INLINE void multiply_add(__m256i& sum, __m256i w, __m256i v) {
  __m256i product;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(v));
}

template <int M, int N, bool First>
INT4MOE_INLINE void half(const uint8_t* codes, const uint8_t* const (&x)[M], size_t at, __m256i (&words)[M][2]) {
  const __m256i w0 = half_line<N>(codes), w1 = half_line<N>(codes + kLineBytes / 2);
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    const __m256i v = broadcast4(x[t] + at + 4 * N);
    if constexpr (First) {
      words[t][0] = _mm256_maddubs_epi16(w0, v);
      words[t][1] = _mm256_maddubs_epi16(w1, v);
    } else {
      multiply_add(words[t][0], w0, v);
      multiply_add(words[t][1], w1, v);
    }
  }
}
#else
// sum += w * v, four products to a lane.
INT4MOE_INLINE void dot(__m256i& sum, __m256i w, __m256i v) {
  __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(v));
}

template <int M, int N>
INT4MOE_INLINE void half_dots(const uint8_t* codes, const uint8_t* const (&x)[M], size_t at, __m256i (&sums)[M][2]) {
  const __m256i w0 = half_line<N>(codes), w1 = half_line<N>(codes + kLineBytes / 2);
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    const __m256i v = broadcast4(x[t] + at + 4 * N);
    dot(sums[t][0], w0, v);
    dot(sums[t][1], w1, v);
  }
}
#endif

// L lines from `codes` on, for M tokens, added to `sums`.
template <int M, int L>
INT4MOE_INLINE void lines_of(const uint8_t* codes, const uint8_t* const (&x)[M], size_t at, __m256i (&sums)[M][2]) {
#ifdef INT4MOE_AVX_VNNI
  INT4MOE_UNROLL
  for (int l = 0; l < L; ++l, codes += kLineBytes, at += kLineColumns) {
    half_dots<M, 0>(codes, x, at, sums);
    half_dots<M, 1>(codes, x, at, sums);
  }
#else
  __m256i words[M][2];
  half<M, 0, true>(codes, x, at, words);
  INT4MOE_UNROLL
  for (int l = 0; l < L; ++l) {
    if (l) half<M, 0, false>(codes, x, at, words);
    // With many tokens there is no register to keep the codes in: they are loaded again for the other half.
    if constexpr (M > 3) __asm__("" : "+r"(codes));
    half<M, 1, false>(codes, x, at, words);
    codes += kLineBytes;
    at += kLineColumns;
  }
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    sums[t][0] = _mm256_add_epi32(sums[t][0], _mm256_madd_epi16(words[t][0], _mm256_set1_epi16(1)));
    sums[t][1] = _mm256_add_epi32(sums[t][1], _mm256_madd_epi16(words[t][1], _mm256_set1_epi16(1)));
  }
#endif
}

struct Int8 {
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
    for (int g = 0, l = 0; g < m.groups; ++g, scaled_at += sizeof(Scaled)) {
      const int to = l + group_lines < m.lines ? l + group_lines : m.lines;
      __m256i sums[M][2];
      start_sums<M>(b, g, x, scaled_at, sums);
      const uint8_t* codes = b.codes + size_t(l) * kLineBytes;
      const ptrdiff_t fetch = to_fetch(b, codes);
      size_t at = size_t(l) * kLineColumns;
      for (; l + kChunk <= to; l += kChunk, codes += kChunk * kLineBytes, at += kChunk * kLineColumns) {
        for (int i = 0; i < kChunk; ++i) prefetch(codes + fetch + i * kLineBytes);
        lines_of<M, kChunk>(codes, x, at, sums);
      }
      for (; l < to; ++l, codes += kLineBytes, at += kLineColumns) {
        prefetch(codes + fetch);
        lines_of<M, 1>(codes, x, at, sums);
      }
      add_scaled<M, S>(b, g, x, scaled_at, sums, total);
    }
    store_rows<M>(total, out, out_stride);
  }
};

}  // namespace
}  // namespace avx2

#ifdef INT4MOE_AVX_VNNI
#define INT4MOE_ROW kAvx2VnniW4A8
#define INT4MOE_ISA "avx2_vnni"
#define INT4MOE_FEATURES (kAvx2 | kAvxVnni)
#else
#define INT4MOE_ROW kAvx2W4A8
#define INT4MOE_ISA "avx2"
#define INT4MOE_FEATURES kAvx2
#endif

extern const Kernels INT4MOE_ROW;
const Kernels INT4MOE_ROW = {INT4MOE_ISA,
                             "w4a8",
                             INT4MOE_FEATURES,
                             avx2::kTile,
                             avx2::row_bytes,
                             avx2::prepare,
                             avx2::Tiled<avx2::Int8>::multiply,
                             avx2::activate,
                             avx2::load,
                             avx2::store,
                             avx2::accumulate};

}  // namespace int4moe
