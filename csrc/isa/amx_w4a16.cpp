// W4A16 on AMX, for 16-bit activations, exactly as the AVX-512 VNNI row has it (int16_rows512.h): int16 activations x in
// two planes of unsigned bytes, high and low byte of x + 32768.
//
// With weights w = code, or code - zero + 15 where zero points are stored, both unsigned,
//   sum((code - zero) x) = 256 sum(w high) + sum(w low) - 32768 sum(w) - c sum(x), c = 8 or 15, modulo 2^32:
// the third term is counted while decoding, the last one comes with the row of activations. (TDPBSUD, with a signed high
// plane, would save the third; unsigned products are the ones that emulators have right.) Few tokens go to the AVX-512
// kernel, which gives the same bits.
#include "core/cpu_features.h"
#include "isa/amx_run.h"
#include "isa/int16_rows512.h"

namespace int4moe {

namespace avx512 {
void multiply_int16(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                    const uint8_t* next);
}

namespace amx {
namespace {

// Up to here the vector kernel takes codes as fast as memory gives them, and in small groups faster than tiles would: a
// tile product takes its time whatever the tokens.
constexpr int kVectorTokens = 4;

struct Int16 {
  static constexpr int kPlanes = 2;
  // kFirst: of the first stretch; kBegins: a stretch that goes on after it; kGoesOn; kEnds: a stretch that began before.
  static constexpr int kPlain = 0, kFirst = 1, kBegins = 2, kGoesOn = 4, kEnds = 8;
  static constexpr bool kParts = true;
  static constexpr bool has(int kind) { return kind <= kBegins || kind == kGoesOn || (kind & ~kFirst) == kEnds; }
  static int kind(const Matrix& m, const Segment& s) {
    const int stretch = avx512::int16_groups_per_stretch(m), at = s.group % stretch;
    const bool begins = at == 0, ends = at == stretch - 1 || s.group == m.groups - 1;
    if (!ends) return begins ? kBegins : kGoesOn;
    if (begins) return s.first ? kFirst : kPlain;
    return s.group < stretch ? kEnds | kFirst : kEnds;
  }

  static int segment_lines(const Matrix&) { return avx512::kInt16SegmentLines; }

  // Tiles of a whole group.
  static int group_tiles(const Matrix& m) {
    const int whole = m.group_lines() / avx512::kInt16SegmentLines, rest = m.group_lines() % avx512::kInt16SegmentLines;
    return whole * kSegmentTiles + (rest + kTileLines - 1) / kTileLines;
  }

  // A row: that of the VNNI kernel; then for each segment its tiles, the low and the high bytes of 64 columns in turn,
  // padded to whole tiles; then for each segment its scale with -8 sum(x), and again with -15 sum(x).
  static size_t tiles_at(const Matrix& m) { return avx512::int16_row_bytes(m); }
  static size_t pairs_at(const Matrix& m) { return tiles_at(m) + size_t(group_tiles(m)) * size_t(m.groups) * 128; }
  static size_t row_bytes(const Matrix& m) {
    return ((pairs_at(m) + 16 * size_t(avx512::int16_segments(m)) + 63) / 64 | 1) * 64;
  }

  static size_t values_at(const Matrix& m, const Segment& s) {
    const int before = (s.line - s.group * m.group_lines()) / kTileLines;
    return tiles_at(m) + size_t(s.group * group_tiles(m) + before) * 128;
  }
  static size_t pair_at(const Matrix& m, const Segment& s) {
    return pairs_at(m) + size_t(s.index) * 16 + (m.zeros ? 8 : 0);
  }

  static void prepare(const Matrix& m, const float* x, uint8_t* row) {
    avx512::int16_prepare(m, x, row);
    // From the order 0 2 4 6 1 3 5 7: the low bytes in order, then the high ones.
    const __m128i order = _mm_setr_epi8(0, 8, 2, 10, 4, 12, 6, 14, 1, 9, 3, 11, 5, 13, 7, 15);
    const __m128i sign = _mm_set1_epi16(-32768);
    Walk walk(m, 0, 1, segment_lines(m), nullptr);
    for (Segment s; walk.next(s);) {
      uint8_t* tiles = row + values_at(m, s);
      for (int l = 0; l < s.tiles * kTileLines; ++l) {
        __m128i words = _mm_setzero_si128();
        if (l < s.lines) words = _mm_load_si128(reinterpret_cast<const __m128i*>(row) + s.line + l);
        const __m128i bytes = _mm_shuffle_epi8(_mm_xor_si128(words, sign), order);
        uint8_t* to = tiles + l / kTileLines * 128 + l % kTileLines * 8;
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to + 64), _mm_unpackhi_epi64(bytes, bytes));
      }
      const uint8_t* from = row + avx512::int16_values_bytes(m) + size_t(s.index) * 8;
      const int32_t eight = avx512::int_at(from + 4);
      const auto scale = uint32_t(avx512::int_at(from)), one = uint32_t(eight >> 3);
      const uint32_t pairs[4] = {scale, uint32_t(eight), scale, 15u * one};
      __builtin_memcpy(row + pairs_at(m) + size_t(s.index) * 16, pairs, 16);
    }
  }

  struct Block {
    __m512 scale;
    __m512i start;  // -32768 * sum of the weights of each row
  };

  INT4MOE_INLINE static __m512i decode(const Matrix& m, const Segment& s, int b, const uint8_t* codes, int lines,
                                       ptrdiff_t ahead, uint8_t* tile) {
    const int block = s.block + b;
    if (!m.zeros) return decode_tile<false>(codes, lines, _mm512_setzero_si512(), ahead, tile);
    const __m512i offset = _mm512_sub_epi32(_mm512_set1_epi32(15), avx512::load_zeros(m.block_zeros(block), s.group));
    const __m128i low_bytes = _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const __m512i bytes = _mm512_shuffle_epi8(offset, _mm512_broadcast_i32x4(low_bytes));
    return decode_tile<true>(codes, lines, bytes, ahead, tile);
  }

  INT4MOE_INLINE static Block block(const Matrix& m, const Segment& s, int b, __m512i codes) {
    const int block = s.block + b;
    if (m.zeros) {
      const __m512i offset = _mm512_sub_epi32(_mm512_set1_epi32(15), avx512::load_zeros(m.block_zeros(block), s.group));
      codes = _mm512_add_epi32(codes, _mm512_mullo_epi32(offset, _mm512_set1_epi32(s.lines * kLineColumns)));
    }
    return {avx512::load_scales(m, m.block_scales(block), s.group),
            _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(codes, 15))};
  }

  struct Token {
    __m512 scale;
    __m512i sum;
    INT4MOE_INLINE explicit Token(const uint8_t* pair)
        : scale(_mm512_set1_ps(avx512::float_at(pair))), sum(_mm512_set1_epi32(avx512::int_at(pair + 4))) {}
  };

  template <int K>
  struct Add {
    __m512 scale;
    __m512i start;

    INT4MOE_INLINE void set(const Block& b) {
      scale = b.scale;
      start = b.start;
    }
    INT4MOE_INLINE void row(const uint8_t* sums, const Token& t, float* total, float* part) const {
      const __m512i high = _mm512_slli_epi32(_mm512_load_si512(sums + kTileBytes), 8);
      const __m512i low = _mm512_add_epi32(_mm512_load_si512(sums), _mm512_add_epi32(t.sum, start));
      const __m512 d = _mm512_cvtepi32_ps(_mm512_add_epi32(high, low));
      const __m512 now = K & (kGoesOn | kEnds) ? _mm512_fmadd_ps(d, scale, _mm512_load_ps(part)) : _mm512_mul_ps(d, scale);
      if constexpr ((K & (kBegins | kGoesOn)) != 0) {
        _mm512_store_ps(part, now);
      } else {
        const __m512 before = K & kFirst ? _mm512_setzero_ps() : _mm512_load_ps(total);
        _mm512_store_ps(total, _mm512_fmadd_ps(now, t.scale, before));
      }
    }
  };

  static void multiply(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                       const uint8_t* next) {
    if (rows.count <= kVectorTokens) return avx512::multiply_int16(m, first, blocks, rows, out, out_stride, next);
    Run<Int16>(m, first, blocks, rows, out, out_stride, next).all();
  }
};

}  // namespace
}  // namespace amx

extern const Kernels kAmxW4A16;
const Kernels kAmxW4A16 = {"amx",
                           "w4a16",
                           kAvx512 | kAvx512Vnni | kAmxTile | kAmxInt8,
                           amx::kTileTokens,
                           amx::Int16::row_bytes,
                           amx::Int16::prepare,
                           amx::Int16::multiply,
                           avx512::activate,
                           avx512::load,
                           avx512::store,
                           avx512::accumulate,
                           type_bit(FloatType::kBFloat16) | type_bit(FloatType::kFloat16)};

}  // namespace int4moe
