// What the AMX rows share: tile configuration, segments, and decoding weights for tiles.
//
// Weights and activations enter the tiles as unsigned bytes, 64 columns at a time, and sums are int32: four products for
// two blocks (32 rows) and two tiles of activations. Sums are exact, so no result depends on the number of tokens.
#pragma once

#include "isa/avx512_common.h"

namespace int4moe {
namespace amx {
namespace {

#define INT4MOE_APART __attribute__((noinline))

constexpr int kTileTokens = 16;
constexpr int kTileBytes = 1024;
constexpr int kTileLines = 8;  // 64 columns
constexpr int kSegmentTiles = 16;
constexpr int kBlocks = 4;  // of a pass over the columns: gathered activations serve all of them

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

// The compiler does not know that tile loads and stores touch memory, and would move vector work across them.
INT4MOE_INLINE void in_order() { __asm__ volatile("" ::: "memory"); }

// Sums of N tiles of activations by B blocks, in tiles: cleared, added to by 64 columns, stored. `between` is done after
// each product; weights of the two blocks are in turn, sums of the second block two tiles behind those of the first, and of
// the second tile of activations `second` bytes.
template <int N, int B>
INT4MOE_INLINE void start_sums() {
  in_order();
  _tile_zero(0);
  if constexpr (B > 1) _tile_zero(1);
  if constexpr (N > 1) _tile_zero(2);
  if constexpr (N > 1 && B > 1) _tile_zero(3);
}

template <int N, int B, class Between>
INT4MOE_INLINE void products(const uint8_t* w, const uint8_t* x0, const uint8_t* x1, size_t stride, Between between) {
  _tile_loadd(6, w, 64);
  _tile_loadd(4, x0, stride);
  _tile_dpbuud(0, 4, 6);
  between();
  if constexpr (B > 1) {
    _tile_loadd(7, w + kTileBytes, 64);
    _tile_dpbuud(1, 4, 7);
    between();
  }
  if constexpr (N > 1) {
    _tile_loadd(5, x1, stride);
    _tile_dpbuud(2, 5, 6);
    between();
    if constexpr (B > 1) {
      _tile_dpbuud(3, 5, 7);
      between();
    }
  }
  in_order();
}

template <int N, int B>
INT4MOE_INLINE void store_sums(uint8_t* sums, int second) {
  _tile_stored(0, sums, 64);
  if constexpr (B > 1) _tile_stored(1, sums + 2 * kTileBytes, 64);
  if constexpr (N > 1) _tile_stored(2, sums + second, 64);
  if constexpr (N > 1 && B > 1) _tile_stored(3, sums + second + 2 * kTileBytes, 64);
  in_order();
}

// Lines [line, line + lines) of a group, for the blocks of a pass.
struct Segment {
  int index, group, line, lines, tiles;
  int block, blocks;
  bool head;   // starts its group
  bool first;  // starts the matrix
};

// All segments of a call: pass by pass, each pass of 4, 2 or 1 blocks over all columns.
class Walk {
 public:
  Walk(const Matrix& m, int first, int blocks, int segment_lines, const uint8_t* next)
      : m_(m), most_(segment_lines), end_(first + blocks), next_(next), block_(first) {
    int longest = m.group_lines() < m.lines ? m.group_lines() : m.lines;
    if (longest > most_) longest = most_;
    widest_ = longest <= kTileLines * kSegmentTiles * 2 / kBlocks ? kBlocks : 2;  // what the scratch holds
    start_pass();
  }

  bool next(Segment& s) {
    if (line_ == m_.lines) {
      block_ += blocks_;
      group_ = line_ = index_ = 0;
      start_pass();
    }
    if (block_ >= end_) return false;
    const int start = group_ * m_.group_lines();
    const int end = start + m_.group_lines() < m_.lines ? start + m_.group_lines() : m_.lines;
    const int lines = end - line_ < most_ ? end - line_ : most_;
    s = {index_++, group_, line_, lines, (lines + kTileLines - 1) / kTileLines, block_, blocks_, line_ == start, line_ == 0};
    line_ += lines;
    if (line_ == end) ++group_;
    return true;
  }

  // Where codes are fetched ahead while the segment is decoded.
  avx512::Ahead fetch(const Segment& s) const {
    const uint8_t* after = s.block + s.blocks < end_ ? m_.block_codes(s.block + s.blocks) : next_;
    return avx512::Ahead(m_, m_.block_codes(s.block), after);
  }

 private:
  void start_pass() {
    const int left = end_ - block_;
    blocks_ = left >= widest_ ? widest_ : left >= 2 ? 2 : 1;
  }

  const Matrix& m_;
  int most_, end_, widest_, blocks_;
  const uint8_t* next_;
  int block_, group_ = 0, line_ = 0, index_ = 0;
};

// Up to 8 lines of codes as a tile of weights: code + offset, zeros behind the last line. Returns the sum of the codes of
// each row.
template <bool kOffset>
INT4MOE_INLINE __m512i decode_tile(const uint8_t* codes, int lines, __m512i offset, ptrdiff_t ahead, uint8_t* tile) {
  const __m512i mask = _mm512_set1_epi8(15);
  __m512i bytes = _mm512_setzero_si512();  // 16 codes, at most 240
  const auto line = [&](int l) __attribute__((always_inline)) {
    avx512::prefetch(codes + l * kLineBytes + ahead);
    __m512i both = _mm512_load_si512(codes + l * kLineBytes);
    __asm__("" : "+v"(both));  // loaded once
    const __m512i low = _mm512_and_si512(both, mask);
    const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    _mm512_store_si512(tile + l * 128, kOffset ? _mm512_add_epi8(low, offset) : low);
    _mm512_store_si512(tile + l * 128 + 64, kOffset ? _mm512_add_epi8(high, offset) : high);
    bytes = _mm512_add_epi8(bytes, _mm512_add_epi8(low, high));
  };
  if (lines >= kTileLines) {
#pragma GCC unroll 8
    for (int l = 0; l < kTileLines; ++l) {
      line(l);
      in_order();
    }
  } else {
#pragma GCC unroll 1
    for (int l = 0; l < lines; ++l) line(l);
#pragma GCC unroll 1
    for (int l = lines; l < kTileLines; ++l) {
      _mm512_store_si512(tile + l * 128, _mm512_setzero_si512());
      _mm512_store_si512(tile + l * 128 + 64, _mm512_setzero_si512());
    }
  }
  return _mm512_dpbusd_epi32(_mm512_setzero_si512(), bytes, _mm512_set1_epi8(1));
}

}  // namespace
}  // namespace amx
}  // namespace int4moe
