// W4A16 on AMX, for activations that are bfloat16 already.
//
// Weights enter the tiles as bfloat16 128 + code: the code is set into the mantissa, exactly, by one instruction for two
// columns of 16 rows and without a look at zero points. (128 + zero) times the sum of the token's activations is taken
// off the group's sum in float32, then the group's scale is applied. So the only roundings beside float32 arithmetic
// are those of the activations (the intermediate ones of a layer are rounded to bfloat16). The tile unit treats denormals
// as zero. Order for one (row, token): the tile products of a segment, column by column as the hardware adds them; then
// two fused multiply-adds into the total, segment by segment.
#include "core/cpu_features.h"
#include "isa/amx_common.h"

namespace int4moe {
namespace amx {
namespace {

struct BFloat16 {
  static constexpr int kTileLines = 4;  // 32 columns

  static int segment_lines(const Matrix&) { return kSegmentTiles * kTileLines; }

  // A row: bfloat16 [lines * 8], each line in the order 0 2 4 6 1 3 5 7, padded by zeros to whole tiles and one more;
  // then the float sum of each segment.
  static size_t values_bytes(const Matrix& m) { return (size_t(m.lines) * 16 + 63 + 64) / 64 * 64; }

  static int segments_per_group(const Matrix& m) {
    constexpr int kMost = kSegmentTiles * kTileLines;
    return (m.group_lines() + kMost - 1) / kMost;
  }

  static size_t row_bytes(const Matrix& m) {
    const size_t sums = 4 * size_t(segments_per_group(m)) * size_t(m.groups);
    return ((values_bytes(m) + sums + 63) / 64 | 1) * 64;
  }

  static size_t value_offset(const Matrix&, int line) { return size_t(line) * 16; }

  static void prepare(const Matrix& m, const float* x, uint8_t* row) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    constexpr int kMost = kSegmentTiles * kTileLines;
    const int lines = int(values_bytes(m) / 16);
    for (int l = m.lines; l < lines; ++l) {
      _mm_store_si128(reinterpret_cast<__m128i*>(row + size_t(l) * 16), _mm_setzero_si128());
    }
    for (int g = 0; g < m.groups; ++g) {
      const int from = g * m.group_lines(), end = from + m.group_lines() < m.lines ? from + m.group_lines() : m.lines;
      for (int part = from; part < end; part += kMost) {
        __m256 sum = _mm256_setzero_ps();
        for (int l = part; l < end && l < part + kMost; ++l) {
          const int at = l * kLineColumns, left = m.columns - at;
          const __mmask8 lanes = left >= 8 ? 0xff : __mmask8((1u << left) - 1);
          const __m128i h = (__m128i)_mm256_cvtneps_pbh(_mm256_maskz_loadu_ps(lanes, x + at));
          sum = _mm256_add_ps(sum, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)));
          _mm_store_si128(reinterpret_cast<__m128i*>(row + size_t(l) * 16), _mm_shuffle_epi8(h, order));
        }
        const float total = avx512::sum_lanes(sum);
        __builtin_memcpy(row + values_bytes(m) + 4 * size_t(g * segments_per_group(m) + (part - from) / kMost), &total, 4);
      }
    }
  }

  // Tile C += token tile C / 2 times block C % 2. (The intrinsics take literals only.)
  template <int C>
  INT4MOE_INLINE static void dot() {
    if constexpr (C == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (C == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (C == 2) _tile_dpbf16ps(2, 5, 6);
    if constexpr (C == 3) _tile_dpbf16ps(3, 5, 7);
  }

  struct Block {
    __m512 scale;
    __m512 zero;  // 128 + zero point
  };

  INT4MOE_INLINE static Block decode(const Matrix& m, const Segment& s, int block, uint8_t* weights,
                                     const avx512::Ahead& fetch) {
    const uint8_t* codes = m.block_codes(block) + size_t(s.from) * kLineBytes;
    const __m512i nibble = _mm512_set1_epi16(15), exponent = _mm512_set1_epi16(0x4300);  // bfloat16 128
    constexpr int kSelect = 0xea;  // (a & b) | c
    for (int l = 0; l < s.lines; ++l, codes += kLineBytes) {
      avx512::prefetch(codes + fetch(s.from + l));
      const __m512i line = _mm512_load_si512(codes);
      auto* tile = reinterpret_cast<__m512i*>(weights + l * 256);
      _mm512_store_si512(tile, _mm512_ternarylogic_epi32(line, nibble, exponent, kSelect));
      _mm512_store_si512(tile + 1, _mm512_ternarylogic_epi32(_mm512_srli_epi16(line, 4), nibble, exponent, kSelect));
      _mm512_store_si512(tile + 2, _mm512_ternarylogic_epi32(_mm512_srli_epi16(line, 8), nibble, exponent, kSelect));
      _mm512_store_si512(tile + 3, _mm512_or_si512(_mm512_srli_epi16(line, 12), exponent));
    }
    // Beyond the segment's end weights are zero; activations there are those of the next segment.
    for (int l = s.lines; l < s.tiles * kTileLines; ++l) {
      auto* tile = reinterpret_cast<__m512i*>(weights + l * 256);
      for (int i = 0; i < 4; ++i) _mm512_store_si512(tile + i, _mm512_setzero_si512());
    }
    const __m512i zero = avx512::load_zeros(m.block_zeros(block), s.group);
    return {avx512::load_scales(m, m.block_scales(block), s.group),
            _mm512_cvtepi32_ps(_mm512_add_epi32(zero, _mm512_set1_epi32(128)))};
  }

  // Where a segment's sum lies in a row, and a token's sum of it.
  struct Extra {
    size_t at;
    Extra(const Matrix& m, const Segment& s) : at(values_bytes(m) + 4 * size_t(s.index)) {}
  };
  struct Token {
    __m512 sum;
    INT4MOE_INLINE Token(const Extra& e, const uint8_t* row) : sum(_mm512_set1_ps(avx512::float_at(row + e.at))) {}
  };

  template <bool kHead, bool kZeros>
  INT4MOE_INLINE static __m512 add(const Block& b, const Token& t, __m512i sums, __m512 total) {
    return _mm512_fmadd_ps(_mm512_fnmadd_ps(b.zero, t.sum, _mm512_castsi512_ps(sums)), b.scale, total);
  }
};

}  // namespace
}  // namespace amx

extern const Kernels kAmxW4A16;
const Kernels kAmxW4A16 = {"amx",
                           "w4a16",
                           kAvx512 | kAvx512Bf16 | kAmxTile | kAmxBf16,
                           2 * amx::kTileTokens,
                           amx::BFloat16::row_bytes,
                           amx::BFloat16::prepare,
                           amx::Multiply<amx::BFloat16>::run,
                           avx512::activate,
                           avx512::load,
                           avx512::store,
                           avx512::accumulate,
                           type_bit(FloatType::kBFloat16)};

}  // namespace int4moe
