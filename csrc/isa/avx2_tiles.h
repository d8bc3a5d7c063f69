// What the integer rows on AVX2 share: reading activations, and the loops that cut a product into register tiles.
#pragma once

#include "isa/avx2_common.h"


namespace int4moe {
namespace avx2 {
namespace {

// Line `line` of float32 activations; columns that do not exist are 0.
inline __m256 load_line(const Matrix& m, const float* x, int line) {
  const int at = line * kLineColumns;
  if (at + kLineColumns <= m.columns) return _mm256_loadu_ps(x + at);
  alignas(32) float tail[8] = {};
  for (int k = at; k < m.columns; ++k) tail[k - at] = x[k];
  return _mm256_load_ps(tail);
}

inline int32_t sum_lanes(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

inline __m256i broadcast4(const uint8_t* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return _mm256_set1_epi32(v);
}

// v & mask with the mask in memory, not in one of the 16 registers.
INT4MOE_INLINE __m256i masked(__m256i v, const uint64_t (&mask)[4]) {
  __asm__("vpand %1, %0, %0" : "+x"(v) : "m"(mask));
  return v;
}

// 16 rows of a matrix, and where reading goes on.
struct Block {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;
  const uint8_t* end;   // of the codes that this call reads in sequence
  const uint8_t* next;  // what is read after them, or null
  ptrdiff_t ahead;      // how far to fetch
};

// What to add to an address near `at`, within the codes of b, to get the address to prefetch.
inline ptrdiff_t to_fetch(const Block& b, const uint8_t* at) {
  if (at + b.ahead < b.end || !b.next) return b.ahead;
  return b.next - b.end + b.ahead;
}

template <int M>
INT4MOE_INLINE void store_rows(const __m256 (&total)[M][2], float* out, size_t out_stride) {
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) {
    _mm256_store_ps(out + t * out_stride, total[t][0]);
    _mm256_store_ps(out + t * out_stride + kHalf, total[t][1]);
  }
}

// K: kTokens and `tile<M, ScaleType>(matrix, block, rows, out, out_stride)` for 1 <= M <= kTokens.
template <class K>
struct Tiled {
  using Tile = void (*)(const Matrix&, const Block&, const uint8_t* const*, float*, size_t);

  template <ScaleType S, int M>
  static void fill(Tile* table) {
    table[M] = K::template tile<M, S>;
    if constexpr (M > 1) fill<S, M - 1>(table);
  }

  template <ScaleType S>
  static void run(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                  const uint8_t* next) {
    Tile table[K::kTokens + 1];
    fill<S, K::kTokens>(table);
    const int tiles = (rows.count + K::kTokens - 1) / K::kTokens;
    const uint8_t* end = m.block_codes(first + blocks);
    const ptrdiff_t distance = ahead_within(end - m.block_codes(first));
    for (int b = 0; b < blocks; ++b) {
      const Block block{m.block_codes(first + b), m.block_scales(first + b), m.block_zeros(first + b), end, next, distance};
      for (int t = 0; t < tiles; ++t) {
        const int from = int(int64_t(rows.count) * t / tiles), to = int(int64_t(rows.count) * (t + 1) / tiles);
        const uint8_t* x[K::kTokens];
        for (int i = from; i < to; ++i) x[i - from] = rows.at(i);
        table[to - from](m, block, x, out + from * out_stride + b * kBlockRows, out_stride);
      }
    }
  }

  static void multiply(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                       const uint8_t* next) {
    switch (m.scale_type) {
      case ScaleType::kFloat16:
        return run<ScaleType::kFloat16>(m, first, blocks, rows, out, out_stride, next);
      case ScaleType::kBFloat16:
        return run<ScaleType::kBFloat16>(m, first, blocks, rows, out, out_stride, next);
      case ScaleType::kFloat32:
        return run<ScaleType::kFloat32>(m, first, blocks, rows, out, out_stride, next);
    }
  }
};

}  // namespace
}  // namespace avx2
}  // namespace int4moe
