// W4A16 on AVX2 for 16-bit activations: int16 values with one scale per token and stretch, exact int32 sums.
//
// A bfloat16 or float16 activation x becomes round(x / s) with s = max|x| / 32767 over the stretch, an error of 2^-16 of
// the largest; that is finer than the rounding of the result to 16 bits. One vpmaddwd takes two columns of 8 rows, where
// a float32 multiply-add takes one, and codes need no conversion. Sums of a segment are exact integers: any order gives
// the same bits. A segment is a group, or a part of a group that is longer than kSegmentLines (for int32 to hold the sum);
// a stretch is as many groups as there are in kStretchLines, or one segment, so that short groups need no scale of their
// own. For one (row, token), stretch by stretch, with d = sum((code - zero) * x) of each segment:
//   part = float(d) * weight scale, then fma(float(d), weight scale, part); total = fma(part, s, total)
#include "core/cpu_features.h"
#include "isa/avx2_tiles.h"

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kTile = 6;             // 12 sums, 2 vectors of codes, an activation and a product: 16 registers
constexpr int kSegmentLines = 128;   // 15 * 32767 * 1024 < 2^31
constexpr int kStretchLines = 16;
constexpr int kValueBytes = 2 * kLineColumns;

int segments_per_group(const Matrix& m) { return (m.group_lines() + kSegmentLines - 1) / kSegmentLines; }
int groups_per_stretch(const Matrix& m) { return m.group_lines() < kStretchLines ? kStretchLines / m.group_lines() : 1; }

// A row, in the order of reading: for each stretch its float scale, then for each segment -8 * (sum of its integers), an
// int32, which is what zero points of 8 add, and int16 [lines * 8], each line in the order 0 2 4 6 1 3 5 7.
size_t row_bytes(const Matrix& m) {
  const size_t segments = size_t(segments_per_group(m)) * size_t(m.groups);
  return ((size_t(m.lines) * kValueBytes + 8 * segments + 63) / 64 | 1) * 64;
}

// Quantises lines [from, to), a stretch, in segments of `lines`. Returns where the row goes on.
uint8_t* prepare_stretch(const Matrix& m, const float* x, int from, int to, int lines, uint8_t* row) {
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  __m256 most = _mm256_setzero_ps(), nothing = _mm256_setzero_ps();
  for (int l = from; l < to; ++l) {
    const __m256 v = load_line(m, x, l);
    most = _mm256_max_ps(most, abs_ps(v));
    nothing = _mm256_fmadd_ps(v, _mm256_setzero_ps(), nothing);  // 0, or NaN once a value is not finite
  }
  const float largest = max_lanes(most), scale = largest * (1.0f / 32767.0f) + sum_lanes(nothing);
  __builtin_memcpy(row, &scale, 4);
  row += 4;
  // Below 1e-30 the inverse would overflow, and nothing that small matters.
  const __m256 inverse = _mm256_set1_ps(largest > 1e-30f ? 32767.0f / largest : 0.0f);
  for (int l = from; l < to;) {
    const int end = l + lines < to ? l + lines : to;
    uint8_t* head = row;
    row += 4;
    __m256i sum = _mm256_setzero_si256();
    for (; l < end; ++l, row += kValueBytes) {
      const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(load_line(m, x, l), inverse));
      sum = _mm256_add_epi32(sum, q);
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(row), _mm_shuffle_epi8(words, order));
    }
    const uint32_t eight = 0u - 8u * uint32_t(sum_lanes(sum));  // any value at all where an activation is not finite
    __builtin_memcpy(head, &eight, 4);
  }
  return row;
}

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  const int stretch = groups_per_stretch(m) * m.group_lines();
  for (int from = 0; from < m.lines; from += stretch) {
    const int end = from + stretch < m.lines ? from + stretch : m.lines;
    if (m.group_lines() < kStretchLines) {
      row = prepare_stretch(m, x, from, end, m.group_lines(), row);
      continue;
    }
    for (int l = from; l < end; l += kSegmentLines) {
      row = prepare_stretch(m, x, l, l + kSegmentLines < end ? l + kSegmentLines : end, kSegmentLines, row);
    }
  }
}

// Where a tile reads.
struct Place {
  const uint8_t *codes, *scales, *zeros;
  size_t at;  // in the rows of activations
};

// --- the lines of a segment
//
// In assembly as a whole: the sums of 6 tokens take 12 of the 16 registers, and compilers that have to keep that up around a
// loop move some to memory or to each other's registers. p.codes and p.at move on to the end of the segment.

#define INT4MOE_PRODUCT(W, SUM) "vpmaddwd %[v], %[" W "], %[p]\n\tvpaddd %[p], %[" SUM "], %[" SUM "]\n\t"
#define INT4MOE_VALUES(T, AT) "vpbroadcastd " AT "(%[x" #T "],%[at]), %[v]\n\t"  // two of token T
#define INT4MOE_PRODUCTS(T, AT, LOW, HIGH) INT4MOE_VALUES(T, AT) INT4MOE_PRODUCT("w0", LOW) INT4MOE_PRODUCT("w1", HIGH)
#define INT4MOE_START(T) "vpbroadcastd (%[x" #T "],%[at]), %[l" #T "]\n\tvpbroadcastd (%[x" #T "],%[at]), %[h" #T "]\n\t"
#define INT4MOE_NEXT_LINE "add $64, %[c]\n\tadd $16, %[at]\n\tcmp %[e], %[c]\n\tjne 1b"
#define INT4MOE_SUMS(T) [l##T] "=&x"(sums[T][0]), [h##T] "=&x"(sums[T][1])
#define INT4MOE_X(T) [x##T] "r"(x[T])

// Codes of two columns of rows 0-7 and 8-15, as int16: columns (0, 2), (4, 6), (1, 3), (5, 7) for shifts by 0, 4, 8, 12. With
// many tokens there is no register to keep them in: they are loaded again for the next pair.
#define INT4MOE_PAIR0 \
  "vmovdqa (%[c]), %[w0]\n\tvmovdqa 32(%[c]), %[w1]\n\tvpand %[m], %[w0], %[w0]\n\tvpand %[m], %[w1], %[w1]\n\t"
#define INT4MOE_PAIR(SHIFT)                                                              \
  "vmovdqa (%[c]), %[w0]\n\tvpsrlw $" SHIFT ", %[w0], %[w0]\n\tvpand %[m], %[w0], %[w0]\n\t" \
  "vmovdqa 32(%[c]), %[w1]\n\tvpsrlw $" SHIFT ", %[w1], %[w1]\n\tvpand %[m], %[w1], %[w1]\n\t"
#define INT4MOE_PAIR12 \
  "vmovdqa (%[c]), %[w0]\n\tvpsrlw $12, %[w0], %[w0]\n\tvmovdqa 32(%[c]), %[w1]\n\tvpsrlw $12, %[w1], %[w1]\n\t"

#define INT4MOE_LINES(STARTS, TOKENS, SUMS, X)                                                                      \
  __asm__ volatile(STARTS "add $4, %[at]\n\t.p2align 5\n1:\tprefetcht1 (%[c],%[f])\n\t" INT4MOE_PAIR0 TOKENS("0")   \
                       INT4MOE_PAIR("4") TOKENS("4") INT4MOE_PAIR("8") TOKENS("8") INT4MOE_PAIR12 TOKENS("12")      \
                           INT4MOE_NEXT_LINE                                                                        \
                   : SUMS, [w0] "=&x"(w0), [w1] "=&x"(w1), [v] "=&x"(v), [p] "=&x"(product), [c] "+r"(p.codes),     \
                     [at] "+r"(p.at)                                                                                \
                   : [e] "r"(end), [f] "r"(fetch), [m] "m"(kLowNibbles), X                                          \
                   : "memory", "cc")

#define INT4MOE_TOKEN(T, AT) INT4MOE_PRODUCTS(T, AT, "l" #T, "h" #T)
#define INT4MOE_TOKENS3(AT) INT4MOE_TOKEN(0, AT) INT4MOE_TOKEN(1, AT) INT4MOE_TOKEN(2, AT)
#define INT4MOE_TOKENS4(AT) INT4MOE_TOKENS3(AT) INT4MOE_TOKEN(3, AT)
#define INT4MOE_TOKENS5(AT) INT4MOE_TOKENS4(AT) INT4MOE_TOKEN(4, AT)
#define INT4MOE_TOKENS6(AT) INT4MOE_TOKENS5(AT) INT4MOE_TOKEN(5, AT)
#define INT4MOE_STARTS3 INT4MOE_START(0) INT4MOE_START(1) INT4MOE_START(2)
#define INT4MOE_STARTS4 INT4MOE_STARTS3 INT4MOE_START(3)
#define INT4MOE_STARTS5 INT4MOE_STARTS4 INT4MOE_START(4)
#define INT4MOE_STARTS6 INT4MOE_STARTS5 INT4MOE_START(5)
#define INT4MOE_SUMS3 INT4MOE_SUMS(0), INT4MOE_SUMS(1), INT4MOE_SUMS(2)
#define INT4MOE_SUMS4 INT4MOE_SUMS3, INT4MOE_SUMS(3)
#define INT4MOE_SUMS5 INT4MOE_SUMS4, INT4MOE_SUMS(4)
#define INT4MOE_SUMS6 INT4MOE_SUMS5, INT4MOE_SUMS(5)
#define INT4MOE_X3 INT4MOE_X(0), INT4MOE_X(1), INT4MOE_X(2)
#define INT4MOE_X4 INT4MOE_X3, INT4MOE_X(3)
#define INT4MOE_X5 INT4MOE_X4, INT4MOE_X(4)
#define INT4MOE_X6 INT4MOE_X5, INT4MOE_X(5)

alignas(32) constexpr uint64_t kLowNibbles[4] = {0x000f000f000f000f, 0x000f000f000f000f, 0x000f000f000f000f,
                                                 0x000f000f000f000f};

// sums[t] = sum((code - 8) * x) of token t, over the codes from p to `end`.
template <int M>
INT4MOE_INLINE void sum_lines(Place& p, const uint8_t* end, ptrdiff_t fetch, const uint8_t* const (&x)[M],
                              __m256i (&sums)[M][2]) {
  __m256i w0, w1, v, product;
  if constexpr (M == 3) {
    INT4MOE_LINES(INT4MOE_STARTS3, INT4MOE_TOKENS3, INT4MOE_SUMS3, INT4MOE_X3);
  } else if constexpr (M == 4) {
    INT4MOE_LINES(INT4MOE_STARTS4, INT4MOE_TOKENS4, INT4MOE_SUMS4, INT4MOE_X4);
  } else if constexpr (M == 5) {
    INT4MOE_LINES(INT4MOE_STARTS5, INT4MOE_TOKENS5, INT4MOE_SUMS5, INT4MOE_X5);
  } else {
    static_assert(M == 6, "as many sums as there are registers");
    INT4MOE_LINES(INT4MOE_STARTS6, INT4MOE_TOKENS6, INT4MOE_SUMS6, INT4MOE_X6);
  }
}

// For one or two tokens decoding is what takes time. Codes of two columns then stay where they are in their int16, 16 or 256
// times as large, for sums of their own: those of 16 times the codes fit in int32 over kSegmentLines, of 256 times over 8.
constexpr int kLines256 = 8;
static_assert(2 * 15 * 16 * 32767ll * kSegmentLines < 1ll << 31 && 2 * 15 * 256 * 32767ll * kLines256 < 1ll << 31, "int32");

// sums += sums_times / 2^shift, exactly
INT4MOE_INLINE void add_shifted(__m256i (&sums)[2], const __m256i (&sums_times)[2], int shift) {
  sums[0] = _mm256_add_epi32(sums[0], _mm256_srai_epi32(sums_times[0], shift));
  sums[1] = _mm256_add_epi32(sums[1], _mm256_srai_epi32(sums_times[1], shift));
}

#define INT4MOE_MASKED(MASK, LOW, HIGH)                                                                          \
  "vpand %[" MASK "], %[a], %[w]\n\t" INT4MOE_PRODUCT("w", LOW) "vpand %[" MASK "], %[b], %[w]\n\t" INT4MOE_PRODUCT("w", HIGH)

// Sums of one token over the codes from p to `end`, at most kLines256.
INT4MOE_INLINE void add_lines(Place& p, const uint8_t* end, ptrdiff_t fetch, const uint8_t* x, __m256i (&sums)[2],
                              __m256i (&sums16)[2], __m256i (&sums256)[2]) {
  __m256i a, b, v, w, product;
  __asm__ volatile(
      "1:\tprefetcht1 (%[c],%[f])\n\tvmovdqa (%[c]), %[a]\n\tvmovdqa 32(%[c]), %[b]\n\t"     //
      INT4MOE_VALUES(0, "0") INT4MOE_MASKED("m", "l", "h")                                   //
      INT4MOE_VALUES(0, "4") INT4MOE_MASKED("m16", "l16", "h16")                             //
      INT4MOE_VALUES(0, "8") INT4MOE_MASKED("m256", "l256", "h256")                          //
      INT4MOE_VALUES(0, "12") "vpsrlw $12, %[a], %[w]\n\t" INT4MOE_PRODUCT("w", "l")         //
      "vpsrlw $12, %[b], %[w]\n\t" INT4MOE_PRODUCT("w", "h") INT4MOE_NEXT_LINE
      : [l] "+x"(sums[0]), [h] "+x"(sums[1]), [l16] "+x"(sums16[0]), [h16] "+x"(sums16[1]), [l256] "+x"(sums256[0]),
        [h256] "+x"(sums256[1]), [a] "=&x"(a), [b] "=&x"(b), [v] "=&x"(v), [w] "=&x"(w), [p] "=&x"(product),
        [c] "+r"(p.codes), [at] "+r"(p.at)
      : [e] "r"(end), [f] "r"(fetch), [x0] "r"(x), [m] "x"(_mm256_set1_epi16(0x0f)), [m16] "x"(_mm256_set1_epi16(0xf0)),
        [m256] "x"(_mm256_set1_epi16(0xf00))
      : "memory", "cc");
}

INT4MOE_INLINE void sum_lines(Place& p, const uint8_t* end, ptrdiff_t fetch, const uint8_t* const (&x)[1],
                              __m256i (&sums)[1][2]) {
  sums[0][0] = sums[0][1] = broadcast4(x[0] + p.at);
  p.at += 4;
  __m256i sums16[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  do {
    __m256i sums256[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    const uint8_t* to = p.codes + kLines256 * kLineBytes;
    add_lines(p, to < end ? to : end, fetch, x[0], sums[0], sums16, sums256);
    add_shifted(sums[0], sums256, 8);
  } while (p.codes != end);
  add_shifted(sums[0], sums16, 4);
}

#define INT4MOE_TWO(AT, L0, H0, L1, H1) INT4MOE_PRODUCTS(0, AT, L0, H0) INT4MOE_PRODUCTS(1, AT, L1, H1)

INT4MOE_INLINE void sum_lines(Place& p, const uint8_t* end, ptrdiff_t fetch, const uint8_t* const (&x)[2],
                              __m256i (&sums)[2][2]) {
  __m256i sums16[2][2], w0, w1, a, v, product;
  __asm__ volatile(
      INT4MOE_START(0) INT4MOE_START(1)                                                                      //
      "add $4, %[at]\n\tvpxor %[i0], %[i0], %[i0]\n\tvpxor %[j0], %[j0], %[j0]\n\t"                          //
      "vpxor %[i1], %[i1], %[i1]\n\tvpxor %[j1], %[j1], %[j1]\n1:\tprefetcht1 (%[c],%[f])\n\t"               //
      "vmovdqa (%[c]), %[a]\n\tvpand %[a], %[m], %[w0]\n\tvpand 32(%[c]), %[m], %[w1]\n\t"                   //
      INT4MOE_TWO("0", "l0", "h0", "l1", "h1")                                                               //
      "vpand %[a], %[m16], %[w0]\n\tvpand 32(%[c]), %[m16], %[w1]\n\t"                                       //
      INT4MOE_TWO("4", "i0", "j0", "i1", "j1")                                                               //
      "vpsrlw $8, %[a], %[w0]\n\tvpand %[w0], %[m], %[w0]\n\t"                                               //
      "vmovdqa 32(%[c]), %[w1]\n\tvpsrlw $8, %[w1], %[w1]\n\tvpand %[w1], %[m], %[w1]\n\t"                   //
      INT4MOE_TWO("8", "l0", "h0", "l1", "h1")                                                               //
      "vpsrlw $12, %[a], %[w0]\n\tvmovdqa 32(%[c]), %[w1]\n\tvpsrlw $12, %[w1], %[w1]\n\t"                   //
      INT4MOE_TWO("12", "l0", "h0", "l1", "h1") INT4MOE_NEXT_LINE
      : INT4MOE_SUMS(0), INT4MOE_SUMS(1), [i0] "=&x"(sums16[0][0]), [j0] "=&x"(sums16[0][1]), [i1] "=&x"(sums16[1][0]),
        [j1] "=&x"(sums16[1][1]), [w0] "=&x"(w0), [w1] "=&x"(w1), [a] "=&x"(a), [v] "=&x"(v), [p] "=&x"(product),
        [c] "+r"(p.codes), [at] "+r"(p.at)
      : [e] "r"(end), [f] "r"(fetch), INT4MOE_X(0), INT4MOE_X(1), [m] "x"(_mm256_set1_epi16(0x0f)),
        [m16] "x"(_mm256_set1_epi16(0xf0))
      : "memory", "cc");
  add_shifted(sums[0], sums16[0], 4);
  add_shifted(sums[1], sums16[1], 4);
}

// values[t] = float(sum((code - zero) * x)) over the codes from p to `end`; p moves on.
template <int M, bool kZeros>
INT4MOE_INLINE void segment(Place& p, const uint8_t* end, ptrdiff_t fetch, const uint8_t* const (&x)[M],
                            __m256 (&values)[M][2]) {
  __m256i sums[M][2];
  const size_t at = p.at;
  sum_lines(p, end, fetch, x, sums);
  if constexpr (kZeros) {
    IntPair z = load_zeros(p.zeros);
    z.low = _mm256_sub_epi32(z.low, _mm256_set1_epi32(8));
    z.high = _mm256_sub_epi32(z.high, _mm256_set1_epi32(8));
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) {
      const __m256i minus = _mm256_srai_epi32(broadcast4(x[t] + at), 3);
      sums[t][0] = _mm256_add_epi32(sums[t][0], _mm256_mullo_epi32(z.low, minus));
      sums[t][1] = _mm256_add_epi32(sums[t][1], _mm256_mullo_epi32(z.high, minus));
    }
  }
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    values[t][0] = _mm256_cvtepi32_ps(sums[t][0]);
    values[t][1] = _mm256_cvtepi32_ps(sums[t][1]);
  }
}

template <int M>
INT4MOE_INLINE void add_scaled(const __m256 (&values)[M][2], const Pair& s, __m256 (&part)[M][2]) {
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    part[t][0] = _mm256_fmadd_ps(values[t][0], s.low, part[t][0]);
    part[t][1] = _mm256_fmadd_ps(values[t][1], s.high, part[t][1]);
  }
}

template <int M>
INT4MOE_INLINE void add_stretch(const uint8_t* const (&x)[M], size_t scale_at, const __m256 (&part)[M][2],
                                __m256 (&total)[M][2]) {
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    const __m256 scale = _mm256_broadcast_ss(reinterpret_cast<const float*>(x[t] + scale_at));
    total[t][0] = _mm256_fmadd_ps(part[t][0], scale, total[t][0]);
    total[t][1] = _mm256_fmadd_ps(part[t][1], scale, total[t][1]);
  }
}

struct Int16 {
  static constexpr int kTokens = kTile;

  template <int M, ScaleType S>
  static void tile(const Matrix& m, const Block& b, const uint8_t* const* rows, float* out, size_t out_stride) {
    if (b.zeros) return run<M, S, true>(m, b, rows, out, out_stride);
    run<M, S, false>(m, b, rows, out, out_stride);
  }

  template <int M, ScaleType S, bool kZeros>
  INT4MOE_INLINE static void run(const Matrix& m, const Block& b, const uint8_t* const* rows, float* out, size_t out_stride) {
    const uint8_t* x[M];
    __m256 total[M][2];
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) {
      x[t] = rows[t];
      total[t][0] = total[t][1] = _mm256_setzero_ps();
    }
    Place p{b.codes, b.scales, b.zeros, 0};
    const uint8_t* last = b.codes + size_t(m.lines) * kLineBytes;
    const ptrdiff_t group = ptrdiff_t(m.group_lines()) * kLineBytes, most = kSegmentLines * kLineBytes;
    const auto nearest = [](const uint8_t* a, const uint8_t* b) { return a < b ? a : b; };
    const auto next_group = [&p] {
      p.scales += kBlockRows * scale_bytes(S);
      if (kZeros) p.zeros += kBlockRows / 2;
    };
    if (group < kStretchLines * kLineBytes) {
      const ptrdiff_t stretch = groups_per_stretch(m) * group;
      while (p.codes != last) {
        __m256 part[M][2];
        INT4MOE_UNROLL
        for (int t = 0; t < M; ++t) part[t][0] = part[t][1] = _mm256_setzero_ps();
        const ptrdiff_t fetch = to_fetch(b, p.codes);
        const uint8_t* end = nearest(p.codes + stretch, last);
        const size_t scale_at = p.at;
        p.at += 4;
        do {
          __m256 values[M][2];
          segment<M, kZeros>(p, nearest(p.codes + group, last), fetch, x, values);
          add_scaled<M>(values, load_scales<S>(p.scales), part);
          next_group();
        } while (p.codes != end);
        add_stretch<M>(x, scale_at, part, total);
      }
    } else {
      while (p.codes != last) {
        const uint8_t* end = nearest(p.codes + group, last);
        do {
          const size_t scale_at = p.at;
          p.at += 4;
          __m256 values[M][2];
          segment<M, kZeros>(p, nearest(p.codes + most, end), to_fetch(b, p.codes), x, values);
          const Pair s = load_scales<S>(p.scales);
          INT4MOE_UNROLL
          for (int t = 0; t < M; ++t) {
            values[t][0] = _mm256_mul_ps(values[t][0], s.low);
            values[t][1] = _mm256_mul_ps(values[t][1], s.high);
          }
          add_stretch<M>(x, scale_at, values, total);
        } while (p.codes != end);
        next_group();
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
