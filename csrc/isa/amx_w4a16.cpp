// W4A16 on AMX, for activations that are bfloat16 already.
//
// Weights enter the tiles as bfloat16 (code - zero), which is exact, by one table look-up for two columns of 16 rows;
// the group's scale is applied in float32 to the sums of the group. So the only roundings beside float32 arithmetic are
// those of the activations (the intermediate ones of a layer are rounded to bfloat16). The tile unit treats denormals as
// zero. Order for one (row, token): the tile products of a segment, column by column as the hardware adds them; then one
// fused multiply-add of the scale into the total, segment by segment.
#include "core/cpu_features.h"
#include "isa/amx_common.h"

namespace int4moe {
namespace amx {
namespace {

struct BFloat16 {
  static constexpr int kTileLines = 4;  // 32 columns

  // A row: bfloat16 [lines * 8], each line in the order 0 2 4 6 1 3 5 7, then one tile of zeros.
  static size_t row_bytes(const Matrix& m) { return ((size_t(m.lines) * 16 + 63 + 64) / 64 | 1) * 64; }

  static size_t value_offset(const Matrix&, int line) { return size_t(line) * 16; }

  static void prepare(const Matrix& m, const float* x, uint8_t* row) {
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const int lines = int(row_bytes(m) / 16);
    for (int l = 0; l < lines; ++l) {
      const int at = l * kLineColumns, left = m.columns - at;
      const __mmask8 lanes = left >= 8 ? 0xff : left > 0 ? __mmask8((1u << left) - 1) : 0;
      const __m128i h = (__m128i)_mm256_cvtneps_pbh(_mm256_maskz_loadu_ps(lanes, x + at));
      _mm_store_si128(reinterpret_cast<__m128i*>(row + size_t(l) * 16), _mm_shuffle_epi8(h, order));
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
  };

  // bfloat16 of index - 15 (indices 0..30), or of (index & 15) - 8.
  INT4MOE_INLINE static __m512i table(bool zeros) {
    alignas(64) uint16_t values[32];
    for (int i = 0; i < 32; ++i) {
      const float f = float(zeros ? i - 15 : (i & 15) - 8);
      uint32_t u;
      __builtin_memcpy(&u, &f, 4);
      values[i] = uint16_t(u >> 16);
    }
    return _mm512_load_si512(values);
  }

  INT4MOE_INLINE static Block decode(const Matrix& m, const Segment& s, int block, uint8_t* weights,
                                     const avx512::Ahead& fetch) {
    const uint8_t* codes = m.block_codes(block) + size_t(s.from) * kLineBytes;
    const uint8_t* zeros = m.block_zeros(block);
    const __m512i values = table(zeros != nullptr), nibble = _mm512_set1_epi16(15);
    __m512i shift = _mm512_setzero_si512();
    if (zeros) {
      const __m512i up = _mm512_sub_epi32(_mm512_set1_epi32(15), avx512::load_zeros(zeros, s.group));
      shift = _mm512_or_si512(up, _mm512_slli_epi32(up, 16));
    }
    for (int l = 0; l < s.lines; ++l, codes += kLineBytes) {
      avx512::prefetch(codes + fetch(s.from + l));
      const __m512i line = _mm512_load_si512(codes);
      // The look-up takes 5 bits of each 16-bit lane; without zero points the table repeats, so the fifth is free.
      __m512i index[4] = {line, _mm512_srli_epi16(line, 4), _mm512_srli_epi16(line, 8), _mm512_srli_epi16(line, 12)};
      if (zeros) {
        for (auto& v : index) v = _mm512_add_epi16(_mm512_and_si512(v, nibble), shift);
      }
      auto* tile = reinterpret_cast<__m512i*>(weights + l * 256);
      for (int i = 0; i < 4; ++i) _mm512_store_si512(tile + i, _mm512_permutexvar_epi16(index[i], values));
    }
    for (int l = s.lines; l < s.tiles * kTileLines; ++l) {
      auto* tile = reinterpret_cast<__m512i*>(weights + l * 256);
      for (int i = 0; i < 4; ++i) _mm512_store_si512(tile + i, _mm512_setzero_si512());
    }
    return {avx512::load_scales(m, m.block_scales(block), s.group)};
  }

  INT4MOE_INLINE static __m512 add(const Matrix&, const Segment&, const Block& b, const uint8_t*, __m512i sums,
                                   __m512 total) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(sums), b.scale, total);
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
