// W4A16 on AVX2: float32 arithmetic on int4 codes.
//
// A code is not shifted to the low bits: masked where it stands in its lane and converted, it is code * 2^(4n) for
// nibble n, exactly, and `prepare` has multiplied the activation by 2^(-4n). (The top nibble would come out negative;
// that one is shifted.) Order of arithmetic for one (row, token), the same for every tile size: within a group one
// chain of fused multiply-adds from -zero * (sum of the group's x), line by line, nibble 0 to 7; then one fused
// multiply-add of the group's scale into the total, group by group.
#include <cstring>

#include "core/cpu_features.h"
#include "isa/avx2_common.h"

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kTile = 6;

// Column of nibble n within a line (see core/layout.h).
constexpr int column_of(int n) { return n % 2 * 4 + n / 2; }

size_t row_bytes(const Matrix& m) {
  const size_t lines = (size_t(m.lines) * kLineColumns + m.groups + 15) / 16;
  return (lines | 1) * 64;  // odd, so that rows of a tile do not fall into one set of the L1 cache
}

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  auto* values = reinterpret_cast<float*>(row);
  float* sums = values + size_t(m.lines) * kLineColumns;
  const __m256 fold = _mm256_setr_ps(1.0f, 0x1p-8f, 0x1p-16f, 0x1p-24f, 0x1p-4f, 0x1p-12f, 0x1p-20f, 1.0f);
  const int group_lines = m.group_lines();
  for (int g = 0; g < m.groups; ++g) {
    __m256 sum = _mm256_setzero_ps();
    const int to = (g + 1) * group_lines < m.lines ? (g + 1) * group_lines : m.lines;
    for (int l = g * group_lines; l < to; ++l) {
      const int at = l * kLineColumns;
      __m256 v;
      if (at + kLineColumns <= m.columns) {
        v = _mm256_loadu_ps(x + at);
      } else {
        alignas(32) float tail[8] = {};
        for (int k = at; k < m.columns; ++k) tail[k - at] = x[k];
        v = _mm256_load_ps(tail);
      }
      sum = _mm256_add_ps(sum, v);
      _mm256_store_ps(values + at, _mm256_mul_ps(v, fold));
    }
    sums[g] = sum_lanes(sum);
  }
}

struct Block {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;
  const uint8_t* end;   // of the codes of this call
  const uint8_t* next;  // where this thread reads afterwards
};

// C groups at once (independent chains, for one or two tokens), M tokens, 16 rows; `lines` lines in each group.
template <int M, int C, ScaleType S>
inline __attribute__((always_inline)) void groups(const Matrix& m, const Block& b, const float* const (&x)[M], int group,
                                                  int lines, __m256 (&total)[M][2]) {
  const size_t first_line = size_t(group) * size_t(m.group_lines());
  const size_t sums_at = size_t(m.lines) * kLineColumns + size_t(group);
  __m256 acc[C][M][2];
  for (int c = 0; c < C; ++c) {
    if (b.zeros) {
      const IntPair z = load_zeros(b.zeros + (group + c) * (kBlockRows / 2));
      const __m256 low = _mm256_cvtepi32_ps(z.low), high = _mm256_cvtepi32_ps(z.high);
      for (int t = 0; t < M; ++t) {
        const __m256 sum = _mm256_set1_ps(-x[t][sums_at + c]);
        acc[c][t][0] = _mm256_mul_ps(low, sum);
        acc[c][t][1] = _mm256_mul_ps(high, sum);
      }
    } else {
      for (int t = 0; t < M; ++t) acc[c][t][0] = acc[c][t][1] = _mm256_set1_ps(-8.0f * x[t][sums_at + c]);
    }
  }
  const uint8_t* codes = b.codes + first_line * kLineBytes;
  const uint8_t* fetch = ahead(codes, b.end, b.next);
  const size_t step = size_t(m.group_lines());
  size_t column = first_line * kLineColumns;
  for (int l = 0; l < lines; ++l, codes += kLineBytes, fetch += kLineBytes, column += kLineColumns) {
    for (int c = 0; c < C; ++c) {
      prefetch(fetch + size_t(c) * step * kLineBytes);
      const auto* p = reinterpret_cast<const __m256i*>(codes + size_t(c) * step * kLineBytes);
      const __m256i v0 = _mm256_load_si256(p), v1 = _mm256_load_si256(p + 1);
      const size_t at = column + size_t(c) * step * kLineColumns;
#pragma GCC unroll 8
      for (int n = 0; n < 8; ++n) {
        __m256 w0, w1;
        if (n < 7) {
          const __m256i mask = _mm256_set1_epi32(15 << (4 * n));
          w0 = _mm256_cvtepi32_ps(_mm256_and_si256(v0, mask));
          w1 = _mm256_cvtepi32_ps(_mm256_and_si256(v1, mask));
        } else {
          w0 = _mm256_cvtepi32_ps(_mm256_srli_epi32(v0, 28));
          w1 = _mm256_cvtepi32_ps(_mm256_srli_epi32(v1, 28));
        }
#pragma GCC unroll 8
        for (int t = 0; t < M; ++t) {
          const __m256 xb = _mm256_broadcast_ss(x[t] + at + column_of(n));
          acc[c][t][0] = _mm256_fmadd_ps(w0, xb, acc[c][t][0]);
          acc[c][t][1] = _mm256_fmadd_ps(w1, xb, acc[c][t][1]);
        }
      }
    }
  }
  for (int c = 0; c < C; ++c) {
    const Pair s = load_scales<S>(b.scales + size_t(group + c) * kBlockRows * scale_bytes(S));
    for (int t = 0; t < M; ++t) {
      total[t][0] = _mm256_fmadd_ps(acc[c][t][0], s.low, total[t][0]);
      total[t][1] = _mm256_fmadd_ps(acc[c][t][1], s.high, total[t][1]);
    }
  }
}

template <int M, ScaleType S>
void block_tile(const Matrix& m, const Block& b, const float* const* rows, float* out, size_t out_stride) {
  constexpr int C = M == 1 ? 4 : M == 2 ? 2 : 1;
  const float* x[M];
  __m256 total[M][2];
  for (int t = 0; t < M; ++t) {
    x[t] = rows[t];
    total[t][0] = total[t][1] = _mm256_setzero_ps();
  }
  const int full = m.columns / m.group_size, lines = m.group_lines();
  int g = 0;
  for (; g + C <= full; g += C) groups<M, C, S>(m, b, x, g, lines, total);
  if constexpr (C > 1) {
    for (; g < full; ++g) groups<M, 1, S>(m, b, x, g, lines, total);
  }
  if (g < m.groups) groups<M, 1, S>(m, b, x, g, m.lines - g * lines, total);
  for (int t = 0; t < M; ++t) {
    _mm256_store_ps(out + t * out_stride, total[t][0]);
    _mm256_store_ps(out + t * out_stride + kHalf, total[t][1]);
  }
}

template <ScaleType S>
void multiply_as(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                 const uint8_t* next) {
  using Tile = void (*)(const Matrix&, const Block&, const float* const*, float*, size_t);
  constexpr Tile kTiles[kTile + 1] = {nullptr,         block_tile<1, S>, block_tile<2, S>, block_tile<3, S>,
                                      block_tile<4, S>, block_tile<5, S>, block_tile<6, S>};
  const uint8_t* end = m.block_codes(first + blocks);
  const int tiles = (rows.count + kTile - 1) / kTile;
  for (int b = 0; b < blocks; ++b) {
    Block block{m.block_codes(first + b), m.block_scales(first + b), m.block_zeros(first + b), end, next};
    for (int t = 0; t < tiles; ++t) {
      const int from = int(int64_t(rows.count) * t / tiles), to = int(int64_t(rows.count) * (t + 1) / tiles);
      const float* x[kTile];
      for (int i = from; i < to; ++i) x[i - from] = reinterpret_cast<const float*>(rows.at(i));
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

extern const Kernels kAvx2W4A16;
const Kernels kAvx2W4A16 = {"avx2",
                            "w4a16",
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
