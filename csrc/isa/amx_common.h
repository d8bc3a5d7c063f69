// What the AMX rows share: tile configuration, and the loops over blocks, groups and tokens.
//
// A tile of weights holds 16 rows of one block. Codes are decoded into it once for all tokens of a call, two blocks at a
// time, in a buffer that stays in L1; scales are applied in float32 when a segment (a group, or a part of a very long
// one) is complete. That is done one step late, after the next tile products have been issued, and so is decoding: vector
// instructions run while the tile unit works. Every number of tokens takes the same path, one token included, so a token's result does not depend
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
    // GCC's intrinsic reads 8 bytes as far as the compiler knows: without this the stores of the others may go.
    __asm__ volatile("" : : "r"(&config) : "memory");
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
  int index, group, from, lines, tiles;
  bool head;   // starts its group
  bool first;  // starts the matrix
};

template <class T>
struct Multiply {
  // Decoded weights of two blocks, sums of two blocks by two token tiles (of this step and of the one before), gathered
  // activations of two token tiles.
  struct Scratch {
    alignas(64) uint8_t weights[2][kSegmentTiles * kTileBytes];
    alignas(64) uint8_t sums[2][4][kTileBytes];
    alignas(64) uint8_t gathered[2 * kTileTokens][kSegmentTiles * 64];
  };

  struct Decoded {
    Segment segment;
    typename T::Block block[2];
  };

  // Sums of up to two token tiles from number `tile` on that are still to be scaled and added.
  struct Pending {
    const Decoded* of = nullptr;
    const uint8_t (*sums)[kTileBytes] = nullptr;
    int tile = 0, count = 0;
  };

  template <int N, int B>
  INT4MOE_INLINE static void products(const uint8_t* const (&x)[2], size_t x_stride, Scratch& scratch, int tiles,
                                      uint8_t (&sums)[4][kTileBytes]) {
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
    _tile_stored(0, sums[0], 64);
    if constexpr (B > 1) _tile_stored(1, sums[1], 64);
    if constexpr (N > 1) _tile_stored(2, sums[2], 64);
    if constexpr (N > 1 && B > 1) _tile_stored(3, sums[3], 64);
  }

  // N token tiles from number `tile` on, B blocks.
  template <int N, int B>
  INT4MOE_INLINE static void token_tiles(const Matrix& m, const Segment& s, const Rows& rows, const avx512::Tiles& cut,
                                         int tile, Scratch& scratch, uint8_t (&sums)[4][kTileBytes]) {
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
    products<N, B>(x, x_stride, scratch, s.tiles, sums);
  }

  // kFirst, kHead: of the matrix, of a group. kZeros: zero points are stored.
  template <int B, bool kFirst, bool kHead, bool kZeros>
  INT4MOE_INLINE static void add_all(const Matrix& m, const Pending& p, const Rows& all, const avx512::Tiles& cut,
                                     float* out, size_t out_stride) {
    const Rows rows = all;  // a copy, which no store can change
    const typename T::Extra extra(m, p.of->segment);
    typename T::Block block[B];
    for (int b = 0; b < B; ++b) block[b] = p.of->block[b];
    for (int n = 0; n < p.count; ++n) {
      const int from = cut.start(p.tile + n), to = cut.start(p.tile + n + 1);
      const uint8_t* sums = p.sums[2 * n];
      float* total = out + size_t(from) * out_stride;
      for (int i = from; i < to; ++i, sums += 64, total += out_stride) {
        const typename T::Token token(extra, rows.at(i));
        for (int b = 0; b < B; ++b) {
          const __m512 before = kFirst ? _mm512_setzero_ps() : _mm512_load_ps(total + b * kBlockRows);
          const __m512i sum = _mm512_load_si512(sums + b * kTileBytes);
          _mm512_store_ps(total + b * kBlockRows, T::template add<kHead, kZeros>(block[b], token, sum, before));
        }
      }
    }
  }

  template <int B>
  INT4MOE_INLINE static void add(const Matrix& m, const Pending& p, const Rows& rows, const avx512::Tiles& cut, float* out,
                                 size_t out_stride) {
    const bool first = p.of->segment.first, head = p.of->segment.head, zeros = m.zeros;
    if (!head) return add_all<B, false, false, false>(m, p, rows, cut, out, out_stride);
    if (first) {
      if (zeros) return add_all<B, true, true, true>(m, p, rows, cut, out, out_stride);
      return add_all<B, true, true, false>(m, p, rows, cut, out, out_stride);
    }
    if (zeros) return add_all<B, false, true, true>(m, p, rows, cut, out, out_stride);
    add_all<B, false, true, false>(m, p, rows, cut, out, out_stride);
  }

  template <int B>
  static void blocks_of(const Matrix& m, int first, const Rows& rows, const avx512::Tiles& cut, Scratch& scratch,
                        float* out, size_t out_stride, const uint8_t* next) {
    const int most_lines = T::segment_lines(m);  // at most kSegmentTiles * kTileLines
    const avx512::Ahead fetch(m, m.block_codes(first), next);
    Decoded decoded[2];  // the pending sums may be of the segment before
    Pending pending;
    int turn = 0, half = 0, index = 0;
    for (int g = 0, l = 0; g < m.groups; ++g) {
      const int end = l + m.group_lines() < m.lines ? l + m.group_lines() : m.lines;
      for (bool head = true; l < end; head = false) {
        const int lines = end - l < most_lines ? end - l : most_lines;
        Decoded& now = decoded[turn ^= 1];
        now.segment = {index++, g, l, lines, (lines + T::kTileLines - 1) / T::kTileLines, head, g == 0 && head};
        for (int b = 0; b < B; ++b) now.block[b] = T::decode(m, now.segment, first + b, scratch.weights[b], fetch);
        for (int tile = 0; tile < cut.tiles; tile += 2) {
          auto& sums = scratch.sums[half ^= 1];
          const int count = tile + 2 <= cut.tiles ? 2 : 1;
          if (count == 2) {
            token_tiles<2, B>(m, now.segment, rows, cut, tile, scratch, sums);
          } else {
            token_tiles<1, B>(m, now.segment, rows, cut, tile, scratch, sums);
          }
          if (pending.of) add<B>(m, pending, rows, cut, out, out_stride);
          pending = {&now, sums, tile, count};
        }
        l += lines;
      }
    }
    add<B>(m, pending, rows, cut, out, out_stride);
  }

  static void run(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                  const uint8_t* next) {
    if (rows.count <= 0) return;
    const avx512::Tiles cut(rows.count, kTileTokens);
    const TileState state((cut.count + cut.tiles - 1) / cut.tiles);
    Scratch scratch;
    for (int b = 0; b < blocks; b += 2) {
      float* at = out + size_t(b) * kBlockRows;
      if (b + 2 <= blocks) {
        const uint8_t* after = b + 2 < blocks ? m.block_codes(first + b + 2) : next;
        blocks_of<2>(m, first + b, rows, cut, scratch, at, out_stride, after);
      } else {
        blocks_of<1>(m, first + b, rows, cut, scratch, at, out_stride, next);
      }
    }
  }
};

}  // namespace
}  // namespace amx
}  // namespace int4moe
