// W4A8 on AVX2: int8 activations, one scale per token and segment of columns, int8 dot products.
//
// A segment is 32 columns, or what is left of a group. Codes 0..15 times activations -127..127: the sum of 16 such
// products fits in int16 (30480), so the four lines of a segment go through vpmaddubsw and 16-bit additions before one
// vpmaddwd widens to int32. Integer sums are exact. For one (row, token), group by group: part = -zero * sum(x), then
// part = fma(float(sum(code * q)), scale of the segment, part) for each segment of int8 values q, then
// total = fma(part, scale of the weights, total).
#include "core/cpu_features.h"
#include "isa/avx2_tiles.h"

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kTile = 6;  // 12 sums, 2 vectors of codes, an activation and a product: 16 registers
constexpr int kSegmentLines = 4;  // whose products fit in int16 sums

size_t values_bytes(const Matrix& m) { return size_t(m.lines) * kLineColumns; }

int segments(const Matrix& m) {
  const int whole = (m.group_lines() + kSegmentLines - 1) / kSegmentLines;
  const int rest = m.lines - (m.groups - 1) * m.group_lines();
  return (m.groups - 1) * whole + (rest + kSegmentLines - 1) / kSegmentLines;
}

// A row: int8 [lines * 8], then the scale of each segment (float), then a float for each group: -8 * (sum of its
// activations), which is what a zero point of 8 adds.
size_t scales_offset(const Matrix& m) { return values_bytes(m); }
size_t sums_offset(const Matrix& m) { return scales_offset(m) + sizeof(float) * size_t(segments(m)); }
size_t row_bytes(const Matrix& m) { return ((sums_offset(m) + sizeof(float) * size_t(m.groups) + 63) / 64 | 1) * 64; }

// Quantises a segment; returns -8 * (sum of its activations as quantised).
INT4MOE_INLINE float prepare_segment(const Matrix& m, const float* x, int from, int lines, uint8_t* row, float* scale) {
  __m256 v[kSegmentLines];
  __m256 most = _mm256_setzero_ps(), nothing = _mm256_setzero_ps();
  INT4MOE_UNROLL
  for (int l = 0; l < kSegmentLines; ++l) {
    v[l] = l < lines ? load_line(m, x, from + l) : _mm256_setzero_ps();
    most = _mm256_max_ps(most, abs_ps(v[l]));
    nothing = _mm256_fmadd_ps(v[l], _mm256_setzero_ps(), nothing);  // 0, or NaN once a value is not finite
  }
  const float largest = max_lanes(most);
  // Below 1e-30 the inverse would overflow, and nothing that small matters.
  const __m256 inverse = _mm256_set1_ps(largest > 1e-30f ? 127.0f / largest : 0.0f);
  __m256i sum = _mm256_setzero_si256();
  INT4MOE_UNROLL
  for (int l = 0; l < kSegmentLines; ++l) {
    if (l >= lines) break;
    const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(v[l], inverse));
    sum = _mm256_add_epi32(sum, q);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(row + size_t(from + l) * kLineColumns), _mm_packs_epi16(words, words));
  }
  *scale = largest * (1.0f / 127.0f) + sum_lanes(nothing);
  return *scale * (-8.0f * float(sum_lanes(sum)));
}

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  auto* scale = reinterpret_cast<float*>(row + scales_offset(m));
  auto* sums = reinterpret_cast<float*>(row + sums_offset(m));
  for (int g = 0, l = 0; g < m.groups; ++g) {
    const int to = l + m.group_lines() < m.lines ? l + m.group_lines() : m.lines;
    float sum = 0;
    for (; l + kSegmentLines <= to; l += kSegmentLines) sum += prepare_segment(m, x, l, kSegmentLines, row, scale++);
    if (l < to) sum += prepare_segment(m, x, l, to - l, row, scale++);
    l = to;
    sums[g] = sum;
  }
}

alignas(32) constexpr uint64_t kLowNibbles[4] = {0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f, 0x0f0f0f0f0f0f0f0f};

// The codes of columns 0-3 (N = 0) or 4-7 (N = 1) of 8 rows, for M tokens.
template <int M, int N>
INT4MOE_INLINE __m256i half_line(const uint8_t* p) {
  const __m256i line = _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i v = N == 0 ? line : _mm256_srli_epi16(line, 4);
  if constexpr (M > 2) return masked(v, kLowNibbles);
  return _mm256_and_si256(v, _mm256_set1_epi8(15));
}

#ifndef INT4MOE_AVX_VNNI
// sum += w * v in 16 bits, in place: compilers add products first when they may, and then run out of registers.
INT4MOE_INLINE void multiply_add(__m256i& sum, __m256i w, __m256i v) {
  __m256i product;
  __asm__("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(sum), "=&x"(product) : "x"(w), "x"(v));
}

template <int M, int N, bool First>
INT4MOE_INLINE void half(const uint8_t* codes, const uint8_t* const (&x)[M], size_t at, __m256i (&words)[M][2]) {
  const __m256i w0 = half_line<M, N>(codes), w1 = half_line<M, N>(codes + kLineBytes / 2);
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
  const __m256i w0 = half_line<M, N>(codes), w1 = half_line<M, N>(codes + kLineBytes / 2);
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    const __m256i v = broadcast4(x[t] + at + 4 * N);
    dot(sums[t][0], w0, v);
    dot(sums[t][1], w1, v);
  }
}
#endif

// sums[t] = sum of code * q over a segment from `codes` on, for M tokens: of L lines or, where that is 0, of `lines`.
template <int M, int L>
INT4MOE_INLINE void segment(const uint8_t* codes, const uint8_t* const (&x)[M], size_t at, int lines,
                            __m256i (&sums)[M][2]) {
  if (L) lines = L;
#ifdef INT4MOE_AVX_VNNI
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_si256();
  for (int l = 0; l < lines; ++l, codes += kLineBytes, at += kLineColumns) {
    half_dots<M, 0>(codes, x, at, sums);
    half_dots<M, 1>(codes, x, at, sums);
  }
#else
  __m256i words[M][2];
  half<M, 0, true>(codes, x, at, words);
  for (int l = 1;; ++l) {
    // With many tokens there is no register to keep the codes in: they are loaded again for the other half.
    if constexpr (M > 3) __asm__("" : "+r"(codes));
    half<M, 1, false>(codes, x, at, words);
    if (l >= lines) break;
    codes += kLineBytes;
    at += kLineColumns;
    half<M, 0, false>(codes, x, at, words);
  }
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    sums[t][0] = _mm256_madd_epi16(words[t][0], _mm256_set1_epi16(1));
    sums[t][1] = _mm256_madd_epi16(words[t][1], _mm256_set1_epi16(1));
  }
#endif
}

// Scales and an eighth of the zero points of one group of a block.
struct GroupOfBlock {
  Pair scales, zeros;
};

// Converted before the group's lines are read, so that nothing waits for them; in memory where M tokens take all registers
// for their sums.
template <ScaleType S, int M>
INT4MOE_INLINE void load_group(const Block& b, int group, GroupOfBlock& to) {
  to.scales = load_scales<S>(b.scales + size_t(group) * kBlockRows * scale_bytes(S));
  if (b.zeros) {
    const IntPair z = load_zeros(b.zeros + group * (kBlockRows / 2));
    to.zeros.low = _mm256_mul_ps(_mm256_cvtepi32_ps(z.low), _mm256_set1_ps(0.125f));
    to.zeros.high = _mm256_mul_ps(_mm256_cvtepi32_ps(z.high), _mm256_set1_ps(0.125f));
  } else if constexpr (M <= 2) {
    to.zeros = to.scales;  // not used, but compilers cannot know
  }
  if constexpr (M > 2) __asm__("" : "+m"(to));
}

// How a group's part starts: it has (another segment of the group), with zero points of 8, with stored ones.
enum class Start { kGoesOn, kEight, kZeros };

template <int M, Start kStart, bool kEnds>
INT4MOE_INLINE void add_sums(const GroupOfBlock& group, const uint8_t* const (&x)[M], size_t scale_at, size_t sum_at,
                             const __m256i (&sums)[M][2], __m256 (&part)[M][2], __m256 (&total)[M][2]) {
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    const __m256 scale = _mm256_broadcast_ss(reinterpret_cast<const float*>(x[t] + scale_at));
    __m256 low, high;
    if constexpr (kStart == Start::kGoesOn) {
      low = part[t][0];
      high = part[t][1];
    } else {
      low = high = _mm256_broadcast_ss(reinterpret_cast<const float*>(x[t] + sum_at));
    }
    if constexpr (kStart == Start::kZeros) {
      low = _mm256_mul_ps(low, group.zeros.low);
      high = _mm256_mul_ps(high, group.zeros.high);
    }
    low = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[t][0]), scale, low);
    high = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[t][1]), scale, high);
    if constexpr (kEnds) {
      total[t][0] = _mm256_fmadd_ps(low, group.scales.low, total[t][0]);
      total[t][1] = _mm256_fmadd_ps(high, group.scales.high, total[t][1]);
    } else {
      part[t][0] = low;
      part[t][1] = high;
    }
  }
}

// part[t] (= -zero * sum(x) where a group begins) += sums[t] * (scale of the activations), and where it ends
// total[t] += part[t] * (scale of the weights). With many tokens both are in memory: a part that is not needed after
// these lines is not stored.
template <int M>
INT4MOE_INLINE void add_segment(const GroupOfBlock& group, bool zeros, bool begins, bool ends, const uint8_t* const (&x)[M],
                                size_t scale_at, size_t sum_at, const __m256i (&sums)[M][2], __m256 (&part)[M][2],
                                __m256 (&total)[M][2]) {
  if (!begins) {
    if (ends) return add_sums<M, Start::kGoesOn, true>(group, x, scale_at, sum_at, sums, part, total);
    return add_sums<M, Start::kGoesOn, false>(group, x, scale_at, sum_at, sums, part, total);
  }
  if (!zeros) {
    if (ends) return add_sums<M, Start::kEight, true>(group, x, scale_at, sum_at, sums, part, total);
    return add_sums<M, Start::kEight, false>(group, x, scale_at, sum_at, sums, part, total);
  }
  if (ends) return add_sums<M, Start::kZeros, true>(group, x, scale_at, sum_at, sums, part, total);
  return add_sums<M, Start::kZeros, false>(group, x, scale_at, sum_at, sums, part, total);
}

// Groups that are one whole segment each.
template <int M, ScaleType S, Start kStart>
INT4MOE_INLINE void short_groups(const Matrix& m, const Block& b, const uint8_t* const (&x)[M], __m256 (&total)[M][2]) {
  const uint8_t* codes = b.codes;
  size_t scale_at = scales_offset(m), at = 0;
  const size_t across = sums_offset(m) - scale_at;
  for (int g = 0; g < m.groups; ++g, scale_at += sizeof(float)) {
    const ptrdiff_t fetch = to_fetch(b, codes);
    GroupOfBlock group;
    load_group<S, M>(b, g, group);
    for (int i = 0; i < kSegmentLines; ++i) prefetch(codes + fetch + i * kLineBytes);
    __m256i sums[M][2];
    segment<M, kSegmentLines>(codes, x, at, kSegmentLines, sums);
    codes += kSegmentLines * kLineBytes;
    at += kSegmentLines * kLineColumns;
    add_sums<M, kStart, true>(group, x, scale_at, scale_at + across, sums, total, total);
  }
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
    if (group_lines == kSegmentLines && m.lines % kSegmentLines == 0) {
      if (b.zeros) {
        short_groups<M, S, Start::kZeros>(m, b, x, total);
      } else {
        short_groups<M, S, Start::kEight>(m, b, x, total);
      }
      store_rows<M>(total, out, out_stride);
      return;
    }
    size_t scale_at = scales_offset(m), sum_at = sums_offset(m), at = 0;
    const uint8_t* codes = b.codes;
    for (int g = 0, l = 0; g < m.groups; ++g, sum_at += sizeof(float)) {
      const int to = l + group_lines < m.lines ? l + group_lines : m.lines;
      const ptrdiff_t fetch = to_fetch(b, codes);
      __m256 part[M][2];
      GroupOfBlock group;
      load_group<S, M>(b, g, group);
      for (bool begins = true; l < to; begins = false, scale_at += sizeof(float)) {
        const int lines = to - l < kSegmentLines ? to - l : kSegmentLines;
        __m256i sums[M][2];
        if (lines == kSegmentLines) {
          for (int i = 0; i < kSegmentLines; ++i) prefetch(codes + fetch + i * kLineBytes);
          segment<M, kSegmentLines>(codes, x, at, lines, sums);
        } else {
          for (int i = 0; i < lines; ++i) prefetch(codes + fetch + i * kLineBytes);
          segment<M, 0>(codes, x, at, lines, sums);
        }
        l += lines;
        codes += lines * kLineBytes;
        at += size_t(lines) * kLineColumns;
        add_segment<M>(group, b.zeros, begins, l == to, x, scale_at, sum_at, sums, part, total);
      }
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
