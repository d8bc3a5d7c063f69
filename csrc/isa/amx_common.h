// What the AMX rows share: tile configuration, and the loops over blocks, groups and tokens.
//
// A tile of weights holds 16 rows of one block. Codes are decoded into it once for all tokens of a call, two blocks at a
// time, in a buffer that stays in L1; scales are applied in float32 when a segment (a group, or a part of a very long
// one) is complete. Every number of tokens takes the same path, one token included, so a token's result does not depend
// on the others: an element of a tile product depends on its own row and column only.
#pragma once

#include "isa/avx512_common.h"

namespace int4moe {
namespace amx {
namespace {

constexpr int kTileTokens = 16;
constexpr int kTileBytes = 1024;
constexpr int kSegmentTiles = 16;

// Tiles 0-3: sums; 4, 5: activations (one row per token); 6, 7: weights.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int tokens) {
    for (int i = 0; i < 8; ++i) {
      column_bytes[i] = 64;
      rows[i] = uint8_t(i < 6 ? tokens : 16);
    }
  }
};

// The tile state of this thread for the length of a call. Released at its end: a thread whose tiles are in their
// initial state costs the kernel nothing at a context switch, and lets the core sleep deeper.
class TileState {
 public:
  explicit TileState(int tokens) {
    const TileConfig config(tokens);
    _tile_loadconfig(&config);
  }
  ~TileState() { _tile_release(); }
  TileState(const TileState&) = delete;
  TileState& operator=(const TileState&) = delete;
};

// The compiler does not know that tile loads read memory.
INT4MOE_INLINE void finish_stores() { __asm__ volatile("" ::: "memory"); }

// Lines [from, from + lines) of a group, decoded and multiplied at once.
struct Segment {
  int group, from, lines, tiles;
  bool head;   // starts its group
  bool first;  // starts the matrix
};

template <class T>
struct Multiply {
  // Decoded weights of two blocks, sums of two blocks by two token tiles, gathered activations of two token tiles.
  struct Scratch {
    alignas(64) uint8_t weights[2][kSegmentTiles * kTileBytes];
    alignas(64) uint8_t sums[4][kTileBytes];
    alignas(64) uint8_t gathered[2 * kTileTokens][kSegmentTiles * 64];
  };

  template <int N, int B>
  INT4MOE_INLINE static void products(const uint8_t* const (&x)[2], size_t x_stride, Scratch& scratch, int tiles) {
    _tile_zero(0);
    if constexpr (B > 1) _tile_zero(1);
    if constexpr (N > 1) _tile_zero(2);
    if constexpr (N > 1 && B > 1) _tile_zero(3);
    for (int i = 0; i < tiles; ++i) {
      _tile_loadd(6, scratch.weights[0] + i * kTileBytes, 64);
      _tile_loadd(4, x[0] + i * 64, x_stride);
      T::template dot<0>();
      if constexpr (B > 1) {
        _tile_loadd(7, scratch.weights[1] + i * kTileBytes, 64);
        T::template dot<1>();
      }
      if constexpr (N > 1) {
        _tile_loadd(5, x[1] + i * 64, x_stride);
        T::template dot<2>();
        if constexpr (B > 1) T::template dot<3>();
      }
    }
    _tile_stored(0, scratch.sums[0], 64);
    if constexpr (B > 1) _tile_stored(1, scratch.sums[1], 64);
    if constexpr (N > 1) _tile_stored(2, scratch.sums[2], 64);
    if constexpr (N > 1 && B > 1) _tile_stored(3, scratch.sums[3], 64);
  }

  // N token tiles from number `tile` on, B blocks.
  template <int N, int B>
  static void token_tiles(const Matrix& m, const Segment& s, const typename T::Block (&block)[2], const Rows& rows,
                          const avx512::Tiles& cut, int tile, Scratch& scratch, float* out, size_t out_stride) {
    const size_t column = T::value_offset(m, s.from);
    const uint8_t* x[2] = {};
    size_t x_stride = rows.stride;
    const int height = (cut.count + cut.tiles - 1) / cut.tiles;
    for (int n = 0; n < N; ++n) {
      const int from = cut.start(tile + n);
      if (!rows.index || height == 1) {
        x[n] = rows.at(from) + column;
        continue;
      }
      // Rows of different tokens lie apart: bring this segment of them together.
      x_stride = sizeof(scratch.gathered[0]);
      x[n] = scratch.gathered[n * kTileTokens];
      for (int i = 0; i < height; ++i) {
        const uint8_t* from_row = rows.at(from + i) + column;
        for (int j = 0; j < s.tiles * 64; j += 64) {
          _mm512_store_si512(scratch.gathered[n * kTileTokens + i] + j, _mm512_loadu_si512(from_row + j));
        }
      }
    }
    finish_stores();
    products<N, B>(x, x_stride, scratch, s.tiles);
    for (int n = 0; n < N; ++n) {
      const int from = cut.start(tile + n), to = cut.start(tile + n + 1);
      for (int b = 0; b < B; ++b) {
        const uint8_t* sums = scratch.sums[2 * n + b];
        float* total = out + size_t(from) * out_stride + size_t(b) * kBlockRows;
        for (int i = from; i < to; ++i, sums += 64, total += out_stride) {
          const __m512 before = s.first ? _mm512_setzero_ps() : _mm512_load_ps(total);
          _mm512_store_ps(total, T::add(m, s, block[b], rows.at(i), _mm512_load_si512(sums), before));
        }
      }
    }
  }

  template <int B>
  static void segment(const Matrix& m, const Segment& s, int first, const Rows& rows, const avx512::Tiles& cut,
                      Scratch& scratch, float* out, size_t out_stride, const avx512::Ahead& fetch) {
    typename T::Block block[2] = {};
    for (int b = 0; b < B; ++b) block[b] = T::decode(m, s, first + b, scratch.weights[b], fetch);
    int tile = 0;
    for (; tile + 2 <= cut.tiles; tile += 2) {
      token_tiles<2, B>(m, s, block, rows, cut, tile, scratch, out, out_stride);
    }
    if (tile < cut.tiles) token_tiles<1, B>(m, s, block, rows, cut, tile, scratch, out, out_stride);
  }

  static void run(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                  const uint8_t* next) {
    if (rows.count <= 0) return;
    const avx512::Tiles cut(rows.count, kTileTokens);
    const TileState state((cut.count + cut.tiles - 1) / cut.tiles);
    Scratch scratch;
    constexpr int kMostLines = kSegmentTiles * T::kTileLines;
    for (int b = 0; b < blocks; b += 2) {
      const bool two = b + 2 <= blocks;
      const avx512::Ahead fetch(m, m.block_codes(first + b), b + 2 < blocks ? m.block_codes(first + b + 2) : next);
      for (int g = 0, l = 0; g < m.groups; ++g) {
        const int end = l + m.group_lines() < m.lines ? l + m.group_lines() : m.lines;
        for (bool head = true; l < end; head = false) {
          const int lines = end - l < kMostLines ? end - l : kMostLines;
          const Segment s{g, l, lines, (lines + T::kTileLines - 1) / T::kTileLines, head, g == 0 && head};
          float* at = out + size_t(b) * kBlockRows;
          if (two) {
            segment<2>(m, s, first + b, rows, cut, scratch, at, out_stride, fetch);
          } else {
            segment<1>(m, s, first + b, rows, cut, scratch, at, out_stride, fetch);
          }
          l += lines;
        }
      }
    }
  }
};

}  // namespace
}  // namespace amx
}  // namespace int4moe
