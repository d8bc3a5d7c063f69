// W4A8 on AVX2: int8 activations, one scale per token and group, int8 dot products.
//
// Codes 0..15 times activations -127..127: the sum of 16 such products fits in int16 (30480), so four lines go through
// vpmaddubsw and 16-bit additions before one vpmaddwd widens to int32. Integer sums are exact; the result of a
// (row, token) is total += float(sum - zero * sum(x)) * (weight scale * activation scale), group by group.
#include <cstring>

#include "core/cpu_features.h"
#include "isa/avx2_common.h"

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kTile = 4;

// A row: int8 [lines * 8], float scale [groups], int32 sum [groups].
size_t row_bytes(const Matrix& m) {
  const size_t lines = (size_t(m.lines) * kLineColumns + 8 * size_t(m.groups) + 63) / 64;
  return (lines | 1) * 64;
}

inline __m256 load_line(const Matrix& m, const float* x, int line) {
  const int at = line * kLineColumns;
  if (at + kLineColumns <= m.columns) return _mm256_loadu_ps(x + at);
  alignas(32) float tail[8] = {};
  for (int k = at; k < m.columns; ++k) tail[k - at] = x[k];
  return _mm256_load_ps(tail);
}

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  auto* scales = reinterpret_cast<float*>(row + size_t(m.lines) * kLineColumns);
  auto* sums = reinterpret_cast<int32_t*>(scales + m.groups);
  const int group_lines = m.group_lines();
  for (int g = 0; g < m.groups; ++g) {
    const int from = g * group_lines, to = from + group_lines < m.lines ? from + group_lines : m.lines;
    __m256 most = _mm256_setzero_ps();
    for (int l = from; l < to; ++l) most = _mm256_max_ps(most, abs_ps(load_line(m, x, l)));
    const float largest = max_lanes(most);
    const __m256 inverse = _mm256_set1_ps(largest > 0 ? 127.0f / largest : 0.0f);
    __m256i sum = _mm256_setzero_si256();
    for (int l = from; l < to; ++l) {
      const __m256i q = _mm256_cvtps_epi32(_mm256_mul_ps(load_line(m, x, l), inverse));
      sum = _mm256_add_epi32(sum, q);
      const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(row + size_t(l) * kLineColumns), _mm_packs_epi16(words, words));
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
    sums[g] = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    scales[g] = largest * (1.0f / 127.0f);
  }
}

struct Block {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;
  const uint8_t* end;
  const uint8_t* next;
};

inline __m256i broadcast4(const uint8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

// Up to four lines, M tokens: 16-bit sums of 16 products, widened into acc.
template <int M, int L>
inline __attribute__((always_inline)) void lines_of(const uint8_t* codes, const uint8_t* const (&x)[M], size_t column,
                                                    __m256i (&acc)[M][2]) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256i words[M][2];
  INT4MOE_UNROLL
  for (int l = 0; l < L; ++l) {
    const auto* p = reinterpret_cast<const __m256i*>(codes + l * kLineBytes);
    const __m256i v0 = _mm256_load_si256(p), v1 = _mm256_load_si256(p + 1);
    const __m256i low0 = _mm256_and_si256(v0, mask), low1 = _mm256_and_si256(v1, mask);
    const __m256i high0 = _mm256_and_si256(_mm256_srli_epi16(v0, 4), mask);
    const __m256i high1 = _mm256_and_si256(_mm256_srli_epi16(v1, 4), mask);
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) {
      const uint8_t* xt = x[t] + column + l * kLineColumns;
      const __m256i a = broadcast4(xt), b = broadcast4(xt + 4);
      const __m256i s0 = _mm256_maddubs_epi16(low0, a), s1 = _mm256_maddubs_epi16(low1, a);
      words[t][0] = l ? _mm256_add_epi16(words[t][0], s0) : s0;
      words[t][1] = l ? _mm256_add_epi16(words[t][1], s1) : s1;
      words[t][0] = _mm256_add_epi16(words[t][0], _mm256_maddubs_epi16(high0, b));
      words[t][1] = _mm256_add_epi16(words[t][1], _mm256_maddubs_epi16(high1, b));
    }
  }
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    acc[t][0] = _mm256_add_epi32(acc[t][0], _mm256_madd_epi16(words[t][0], ones));
    acc[t][1] = _mm256_add_epi32(acc[t][1], _mm256_madd_epi16(words[t][1], ones));
  }
}

template <int M, ScaleType S>
void block_tile(const Matrix& m, const Block& b, const uint8_t* const* rows, float* out, size_t out_stride) {
  const uint8_t* x[M];
  __m256 total[M][2];
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    x[t] = rows[t];
    total[t][0] = total[t][1] = _mm256_setzero_ps();
  }
  const size_t scales_at = size_t(m.lines) * kLineColumns;
  const int group_lines = m.group_lines();
  for (int g = 0; g < m.groups; ++g) {
    const int from = g * group_lines, to = from + group_lines < m.lines ? from + group_lines : m.lines;
    const uint8_t* codes = b.codes + size_t(from) * kLineBytes;
    const uint8_t* fetch = ahead(codes, b.end, b.next);
    size_t column = size_t(from) * kLineColumns;
    __m256i acc[M][2];
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) acc[t][0] = acc[t][1] = _mm256_setzero_si256();
    int l = from;
    for (; l + 4 <= to; l += 4, codes += 4 * kLineBytes, fetch += 4 * kLineBytes, column += 4 * kLineColumns) {
      for (int i = 0; i < 4; ++i) prefetch(fetch + i * kLineBytes);
      lines_of<M, 4>(codes, x, column, acc);
    }
    for (; l < to; ++l, codes += kLineBytes, column += kLineColumns) lines_of<M, 1>(codes, x, column, acc);

    const Pair s = load_scales<S>(b.scales + size_t(g) * kBlockRows * scale_bytes(S));
    IntPair z{_mm256_set1_epi32(8), _mm256_set1_epi32(8)};
    if (b.zeros) z = load_zeros(b.zeros + g * (kBlockRows / 2));
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) {
      float x_scale;
      int32_t x_sum;
      __builtin_memcpy(&x_scale, x[t] + scales_at + 4 * size_t(g), 4);
      __builtin_memcpy(&x_sum, x[t] + scales_at + 4 * size_t(m.groups + g), 4);
      const __m256i sum = _mm256_set1_epi32(x_sum);
      const __m256 xs = _mm256_set1_ps(x_scale);
      const __m256i d0 = _mm256_sub_epi32(acc[t][0], _mm256_mullo_epi32(z.low, sum));
      const __m256i d1 = _mm256_sub_epi32(acc[t][1], _mm256_mullo_epi32(z.high, sum));
      total[t][0] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d0), _mm256_mul_ps(s.low, xs), total[t][0]);
      total[t][1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d1), _mm256_mul_ps(s.high, xs), total[t][1]);
    }
  }
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    _mm256_store_ps(out + t * out_stride, total[t][0]);
    _mm256_store_ps(out + t * out_stride + kHalf, total[t][1]);
  }
}

template <ScaleType S>
void multiply_as(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                 const uint8_t* next) {
  using Tile = void (*)(const Matrix&, const Block&, const uint8_t* const*, float*, size_t);
  constexpr Tile kTiles[kTile + 1] = {nullptr, block_tile<1, S>, block_tile<2, S>, block_tile<3, S>, block_tile<4, S>};
  const uint8_t* end = m.block_codes(first + blocks);
  const int tiles = (rows.count + kTile - 1) / kTile;
  for (int b = 0; b < blocks; ++b) {
    Block block{m.block_codes(first + b), m.block_scales(first + b), m.block_zeros(first + b), end, next};
    for (int t = 0; t < tiles; ++t) {
      const int from = int(int64_t(rows.count) * t / tiles), to = int(int64_t(rows.count) * (t + 1) / tiles);
      const uint8_t* x[kTile];
      for (int i = from; i < to; ++i) x[i - from] = rows.at(i);
      kTiles[to - from](m, block, x, out + from * out_stride + b * kBlockRows, out_stride);
    }
  }
}

void multiply(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
              const uint8_t* next) {
  switch (m.scale_type) {
    case ScaleType::kFloat16:
      return multiply_as<ScaleType::kFloat16>(m, first, blocks, rows, out, out_stride, next);
    case ScaleType::kBFloat16:
      return multiply_as<ScaleType::kBFloat16>(m, first, blocks, rows, out, out_stride, next);
    case ScaleType::kFloat32:
      return multiply_as<ScaleType::kFloat32>(m, first, blocks, rows, out, out_stride, next);
  }
}

}  // namespace
}  // namespace avx2

extern const Kernels kAvx2W4A8;
const Kernels kAvx2W4A8 = {"avx2",
                           "w4a8",
                           kAvx2,
                           avx2::kTile,
                           avx2::row_bytes,
                           avx2::prepare,
                           avx2::multiply,
                           avx2::activate,
                           avx2::load,
                           avx2::store,
                           avx2::accumulate};

}  // namespace int4moe
