// W4A8 on AMX: codes 0..15 and activations + 128, both unsigned, in int32 sums.
//
// sum c q = sum c (q + 128) - 128 sum c: the second term is counted while decoding. All in integers, hence equal to the bit
// to the AVX-512 VNNI kernel (see w4a8_rows512.h), which takes over for few tokens. (TDPBSUD would save the second term;
// unsigned products are the ones that emulators have right.)
#include "core/cpu_features.h"
#include "isa/amx_common.h"
#include "isa/w4a8_rows512.h"

namespace int4moe {

namespace avx512 {
void multiply_w4a8(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                   const uint8_t* next);
}

namespace amx {
namespace {

// Up to here the vector kernel is expected to be faster: a tile product takes its time whatever the tokens.
constexpr int kVectorTokens = 4;

struct Int8 {
  static constexpr int kTileLines = 8;  // 64 columns

  static int segment_lines(const Matrix& m) { return avx512::w4a8_segment_lines(m); }

  // A row: that of the VNNI kernel, then uint8 (x + 128) with as much padding as its int8 part.
  static size_t row_bytes(const Matrix& m) {
    return ((avx512::w4a8_row_bytes(m) + avx512::w4a8_values(m)) / 64 | 1) * 64;
  }

  static size_t value_offset(const Matrix& m, int line) {
    return avx512::w4a8_row_bytes(m) + size_t(line) * kLineColumns;
  }

  static void prepare(const Matrix& m, const float* x, uint8_t* row) {
    avx512::w4a8_prepare(m, x, row);
    uint8_t* values = row + avx512::w4a8_row_bytes(m);
    for (size_t i = 0; i < avx512::w4a8_values(m); i += 64) {
      const __m512i v = _mm512_load_si512(row + i);
      _mm512_store_si512(values + i, _mm512_xor_si512(v, _mm512_set1_epi8(-128)));
    }
  }

  // Tile C += token tile C / 2 times block C % 2. (The intrinsics take literals only.)
  template <int C>
  INT4MOE_INLINE static void dot() {
    if constexpr (C == 0) _tile_dpbuud(0, 4, 6);
    if constexpr (C == 1) _tile_dpbuud(1, 4, 7);
    if constexpr (C == 2) _tile_dpbuud(2, 5, 6);
    if constexpr (C == 3) _tile_dpbuud(3, 5, 7);
  }

  struct Block {
    avx512::W4A8Group group;
    __m512i codes;  // 128 * sum of the codes of each row
  };

  INT4MOE_INLINE static Block decode(const Matrix& m, const Segment& s, int block, uint8_t* weights,
                                     const avx512::Ahead& fetch) {
    const uint8_t* codes = m.block_codes(block) + size_t(s.from) * kLineBytes;
    const __m512i mask = _mm512_set1_epi8(15), ones = _mm512_set1_epi8(1);
    __m512i sum = _mm512_setzero_si512();
    for (int l = 0; l < s.lines;) {
      const int to = l + kTileLines < s.lines ? l + kTileLines : s.lines;
      __m512i bytes = _mm512_setzero_si512();  // of the lines of a tile: 16 codes, at most 240
      for (; l < to; ++l, codes += kLineBytes) {
        avx512::prefetch(codes + fetch(s.from + l));
        const __m512i line = _mm512_load_si512(codes);
        const __m512i low = _mm512_and_si512(line, mask);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(line, 4), mask);
        _mm512_store_si512(weights + l * 128, low);
        _mm512_store_si512(weights + l * 128 + 64, high);
        bytes = _mm512_add_epi8(bytes, _mm512_add_epi8(low, high));
      }
      sum = _mm512_dpbusd_epi32(sum, bytes, ones);
    }
    for (int l = s.lines; l < s.tiles * kTileLines; ++l) {
      _mm512_store_si512(weights + l * 128, _mm512_setzero_si512());
      _mm512_store_si512(weights + l * 128 + 64, _mm512_setzero_si512());
    }
    return {avx512::w4a8_group(m, m.block_scales(block), m.block_zeros(block), s.group), _mm512_slli_epi32(sum, 7)};
  }

  // Where a segment's scale and its group's sum lie in a row, and those of a token. A group's sum counts with its head.
  struct Extra {
    size_t scale, sum;
    Extra(const Matrix& m, const Segment& s)
        : scale(avx512::w4a8_scales(m) + 4 * size_t(s.index)), sum(avx512::w4a8_sums(m) + 4 * size_t(s.group)) {}
  };
  struct Token {
    float scale, sum;
    INT4MOE_INLINE Token(const Extra& e, const uint8_t* row)
        : scale(avx512::float_at(row + e.scale)), sum(avx512::float_at(row + e.sum)) {}
  };

  // Integers of a segment are below 2^24: float32 has them exactly, and the bits of the VNNI kernel.
  template <bool kHead, bool kZeros>
  INT4MOE_INLINE static __m512 add(const Block& b, const Token& t, __m512i sums, __m512 total) {
    return avx512::w4a8_add<kHead, kZeros>(b.group, _mm512_sub_epi32(sums, b.codes), t.scale, t.sum, total);
  }

  static void multiply(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                       const uint8_t* next) {
    const auto run = rows.count <= kVectorTokens ? avx512::multiply_w4a8 : Multiply<Int8>::run;
    run(m, first, blocks, rows, out, out_stride, next);
  }
};

}  // namespace
}  // namespace amx

extern const Kernels kAmxW4A8;
const Kernels kAmxW4A8 = {"amx",
                          "w4a8",
                          kAvx512 | kAvx512Vnni | kAmxTile | kAmxInt8,
                          2 * amx::kTileTokens,
                          amx::Int8::row_bytes,
                          amx::Int8::prepare,
                          amx::Int8::multiply,
                          avx512::activate,
                          avx512::load,
                          avx512::store,
                          avx512::accumulate};

}  // namespace int4moe
