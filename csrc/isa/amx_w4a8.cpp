// W4A8 on AMX: codes 0..15 and activations + 128, both unsigned, in int32 sums.
//
// sum c q = sum c (q + 128) - 128 sum c: the second term is counted while decoding. All in integers, hence equal to the bit
// to the AVX-512 VNNI kernel (see w4a8_rows512.h), which takes over for few tokens. (TDPBSUD would save the second term;
// unsigned products are the ones that emulators have right.)
#include "core/cpu_features.h"
#include "isa/amx_run.h"
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
  static constexpr int kPlanes = 1;
  static constexpr int kPlain = 0, kFirst = 1, kMore = 2, kZeros = 4;  // kMore: not the first segment of its group
  static constexpr bool kParts = false;
  static constexpr bool has(int kind) { return kind < 8; }
  static int kind(const Matrix& m, const Segment& s) {
    return !s.head ? kMore : (m.zeros ? kZeros : 0) | (s.first ? kFirst : 0);
  }

  static int segment_lines(const Matrix& m) { return avx512::w4a8_segment_lines(m); }

  // A row: that of the VNNI kernel; then uint8 (x + 128) with as much padding as its int8 part; then for each segment its
  // scale with the float of its group.
  static size_t tiles_at(const Matrix& m) { return avx512::w4a8_row_bytes(m); }
  static size_t pairs_at(const Matrix& m) { return tiles_at(m) + avx512::w4a8_values(m); }
  static size_t row_bytes(const Matrix& m) {
    return ((pairs_at(m) + 8 * size_t(avx512::w4a8_segments(m)) + 63) / 64 | 1) * 64;
  }

  static size_t values_at(const Matrix& m, const Segment& s) { return tiles_at(m) + size_t(s.line) * kLineColumns; }
  static size_t pair_at(const Matrix& m, const Segment& s) { return pairs_at(m) + size_t(s.index) * 8; }

  static void prepare(const Matrix& m, const float* x, uint8_t* row) {
    avx512::w4a8_prepare(m, x, row);
    uint8_t* values = row + tiles_at(m);
    for (size_t i = 0; i < avx512::w4a8_values(m); i += 64) {
      const __m512i v = _mm512_load_si512(row + i);
      _mm512_store_si512(values + i, _mm512_xor_si512(v, _mm512_set1_epi8(-128)));
    }
    Walk walk(m, 0, 1, segment_lines(m), nullptr);
    for (Segment s; walk.next(s);) {
      uint8_t* pair = row + pair_at(m, s);
      __builtin_memcpy(pair, row + avx512::w4a8_scales(m) + 4 * size_t(s.index), 4);
      __builtin_memcpy(pair + 4, row + avx512::w4a8_sums(m) + 4 * size_t(s.group), 4);
    }
  }

  struct Block {
    avx512::W4A8Group group;
    __m512i start;  // -128 * sum of the codes of each row
  };

  INT4MOE_INLINE static __m512i decode(const Matrix&, const Segment&, int, const uint8_t* codes, int lines, ptrdiff_t ahead,
                                       uint8_t* tile) {
    return decode_tile<false>(codes, lines, _mm512_setzero_si512(), ahead, tile);
  }

  INT4MOE_INLINE static Block block(const Matrix& m, const Segment& s, int b, __m512i codes) {
    const int block = s.block + b;
    return {avx512::w4a8_group(m, m.block_scales(block), m.block_zeros(block), s.group),
            _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(codes, 7))};
  }

  struct Token {
    float scale, sum;
    INT4MOE_INLINE explicit Token(const uint8_t* pair) : scale(avx512::float_at(pair)), sum(avx512::float_at(pair + 4)) {}
  };

  template <int K>
  struct Add {
    avx512::W4A8Group group;
    __m512i start;

    INT4MOE_INLINE void set(const Block& b) {
      group = b.group;
      start = b.start;
    }
    // Integers of a segment are below 2^24: float32 has them exactly, and the bits of the VNNI kernel.
    INT4MOE_INLINE void row(const uint8_t* sums, const Token& t, float* total, float*) const {
      const __m512i d = _mm512_add_epi32(_mm512_load_si512(sums), start);
      const __m512 before = K & kFirst ? _mm512_setzero_ps() : _mm512_load_ps(total);
      _mm512_store_ps(total, avx512::w4a8_add<!(K & kMore), (K & kZeros) != 0>(group, d, t.scale, t.sum, before));
    }
  };

  static void multiply(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                       const uint8_t* next) {
    if (rows.count <= kVectorTokens) return avx512::multiply_w4a8(m, first, blocks, rows, out, out_stride, next);
    Run<Int8>(m, first, blocks, rows, out, out_stride, next).all();
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
