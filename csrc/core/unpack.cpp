#include "core/unpack.h"

#include <emmintrin.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/threads.h"

namespace int4moe {

namespace {

// A tile is kTileRows rows of W times kTileWords words of K: 64 bytes of each row, which is one cache line.
constexpr int kTileRows = 64;
constexpr int kTileWords = 16;

__m128i load(const uint32_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
void store(uint32_t* p, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }

// 4x4 words: out[j * out_stride + i] = in[i * in_stride + j].
void transpose4(const uint32_t* in, size_t in_stride, uint32_t* out, size_t out_stride) {
  const __m128i a = load(in), b = load(in + in_stride), c = load(in + 2 * in_stride), d = load(in + 3 * in_stride);
  const __m128i ab0 = _mm_unpacklo_epi32(a, b), ab1 = _mm_unpackhi_epi32(a, b);
  const __m128i cd0 = _mm_unpacklo_epi32(c, d), cd1 = _mm_unpackhi_epi32(c, d);
  store(out, _mm_unpacklo_epi64(ab0, cd0));
  store(out + out_stride, _mm_unpackhi_epi64(ab0, cd0));
  store(out + 2 * out_stride, _mm_unpacklo_epi64(ab1, cd1));
  store(out + 3 * out_stride, _mm_unpackhi_epi64(ab1, cd1));
}

// [rows][columns] words to [columns][rows].
void transpose(const uint32_t* in, size_t in_stride, int rows, int columns, uint32_t* out, size_t out_stride) {
  const int rows4 = rows & ~3, columns4 = columns & ~3;
  for (int r = 0; r < rows4; r += 4) {
    for (int c = 0; c < columns4; c += 4) transpose4(in + r * in_stride + c, in_stride, out + c * out_stride + r, out_stride);
  }
  for (int r = 0; r < rows; ++r) {
    for (int c = r < rows4 ? columns4 : 0; c < columns; ++c) out[c * out_stride + r] = in[r * in_stride + c];
  }
}

// Words [count][kTileRows] of a tile to `bytes` bytes of each of its rows.
void write_rows(const uint32_t* tile, int rows, size_t bytes, uint8_t* codes, size_t row_bytes) {
  alignas(64) uint32_t turned[kTileRows * kTileWords];
  const int count = int((bytes + 3) / 4);
  transpose(tile, kTileRows, count, rows, turned, kTileWords);
  for (int r = 0; r < rows; ++r) std::memcpy(codes + r * row_bytes, turned + r * kTileWords, bytes);
}

// Swaps the bits of a that mask << shift selects with those of b that mask selects.
void exchange(__m128i& a, __m128i& b, __m128i mask, int shift) {
  const __m128i t = _mm_and_si128(_mm_xor_si128(_mm_srli_epi32(a, shift), b), mask);
  a = _mm_xor_si128(a, _mm_slli_epi32(t, shift));
  b = _mm_xor_si128(b, t);
}

// Eight vectors as an 8x8 matrix of nibbles in each 32-bit lane: nibble i of vector k becomes nibble k of vector i.
void transpose_nibbles(__m128i v[8]) {
  for (int k : {0, 2, 4, 6}) exchange(v[k], v[k + 1], _mm_set1_epi32(0x0f0f0f0f), 4);
  for (int k : {0, 1, 4, 5}) exchange(v[k], v[k + 2], _mm_set1_epi32(0x00ff00ff), 8);
  for (int k : {0, 1, 2, 3}) exchange(v[k], v[k + 4], _mm_set1_epi32(0x0000ffff), 16);
}

constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};

// One tile of AWQ words: `groups` (at most 8) word columns, `columns` (at most 128) rows of them.
void awq_tile(const uint32_t* words, size_t stride, int groups, int columns, uint8_t* codes, size_t row_bytes) {
  alignas(64) uint32_t turned[kTileRows * kTileWords];
  for (int k = 0; k < columns; k += 8) {
    for (int g = 0; g < groups; g += 4) {
      __m128i v[8];
      alignas(16) uint32_t edge[4] = {};
      const int lanes = std::min(4, groups - g);
      for (int i = 0; i < 8; ++i) {
        if (k + i >= columns) {
          v[i] = _mm_setzero_si128();
        } else if (lanes == 4) {
          v[i] = load(words + (k + i) * stride + g);
        } else {
          std::memcpy(edge, words + (k + i) * stride + g, size_t(lanes) * 4);
          v[i] = load(edge);
        }
      }
      transpose_nibbles(v);
      for (int i = 0; i < 8; ++i) {
        alignas(16) uint32_t lane[4];
        store(lane, v[i]);
        for (int j = 0; j < lanes; ++j) turned[((g + j) * 8 + kAwqOrder[i]) * kTileWords + k / 8] = lane[j];
      }
    }
  }
  for (int r = 0; r < groups * 8; ++r) std::memcpy(codes + r * row_bytes, turned + r * kTileWords, size_t(columns) / 2);
}

// Word r of the result holds stored columns perm[8r .. 8r+8) of `panel` [words][kTileRows].
void gather(const uint32_t* panel, const int32_t* perm, int columns, uint32_t* out) {
  for (int at = 0; at < kTileRows; at += 16) {
    __m128i sum[4] = {_mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128(), _mm_setzero_si128()};
    for (int i = columns - 1; i >= 0; --i) {
      const uint32_t* from = panel + size_t(perm[i] >> 3) * kTileRows + at;
      const __m128i shift = _mm_cvtsi32_si128((perm[i] & 7) * 4);
      for (int v = 0; v < 4; ++v) {
        const __m128i code = _mm_and_si128(_mm_srl_epi32(load(from + 4 * v), shift), _mm_set1_epi32(15));
        sum[v] = _mm_or_si128(_mm_slli_epi32(sum[v], 4), code);
      }
    }
    for (int v = 0; v < 4; ++v) store(out + at + 4 * v, sum[v]);
  }
}

class Unpacker {
 public:
  Unpacker(Packing packing, const uint32_t* words, int rows, int columns, const int32_t* perm, uint8_t* codes)
      : packing_(packing), words_(words), rows_(rows), columns_(columns), perm_(perm), codes_(codes),
        row_words_((columns + 7) / 8), row_bytes_(size_t(columns) / 2) {}

  // panel: room for one block of all columns, used under a permutation.
  void block(int first, int rows, uint32_t* panel) const {
    uint8_t* codes = codes_ + first * row_bytes_;
    if (packing_ == Packing::kAwq) {
      const size_t stride = size_t(rows_) / 8;
      for (int k = 0; k < columns_; k += kTileWords * 8) {
        const int columns = std::min(kTileWords * 8, columns_ - k);
        awq_tile(words_ + k * stride + first / 8, stride, rows / 8, columns, codes + k / 2, row_bytes_);
      }
    } else if (perm_) {
      permuted_block(first, rows, panel);
    } else if (packing_ == Packing::kColumns) {
      for (int w = 0; w < row_words_; w += kTileWords) {
        const int count = std::min(kTileWords, row_words_ - w);
        alignas(64) uint32_t tile[kTileRows * kTileWords];
        for (int i = 0; i < count; ++i) {
          std::memcpy(tile + i * kTileRows, words_ + size_t(w + i) * rows_ + first, size_t(rows) * 4);
        }
        write_rows(tile, rows, size_t(count) * 4, codes + size_t(w) * 4, row_bytes_);
      }
    } else {
      for (int r = 0; r < rows; ++r) {
        std::memcpy(codes + r * row_bytes_, words_ + size_t(first + r) * row_words_, row_bytes_);
      }
    }
  }

 private:
  void permuted_block(int first, int rows, uint32_t* panel) const {
    if (packing_ == Packing::kColumns) {
      for (int w = 0; w < row_words_; ++w) {
        std::memcpy(panel + size_t(w) * kTileRows, words_ + size_t(w) * rows_ + first, size_t(rows) * 4);
      }
    } else {
      transpose(words_ + size_t(first) * row_words_, size_t(row_words_), rows, row_words_, panel, kTileRows);
    }
    for (int k = 0; k < columns_; k += kTileWords * 8) {
      const int columns = std::min(kTileWords * 8, columns_ - k);
      alignas(64) uint32_t tile[kTileRows * kTileWords];
      for (int i = 0; i < columns; i += 8) gather(panel, perm_ + k + i, std::min(8, columns - i), tile + i / 8 * kTileRows);
      write_rows(tile, rows, size_t(columns) / 2, codes_ + first * row_bytes_ + k / 2, row_bytes_);
    }
  }

  const Packing packing_;
  const uint32_t* const words_;
  const int rows_, columns_;
  const int32_t* const perm_;
  uint8_t* const codes_;
  const int row_words_;
  const size_t row_bytes_;
};

}  // namespace

void canonical_codes(Packing packing, const uint32_t* words, int rows, int columns, const int32_t* perm, uint8_t* codes,
                     int threads) {
  const Unpacker unpacker(packing, words, rows, columns, perm, codes);
  const int blocks = (rows + kTileRows - 1) / kTileRows;
  threads = std::max(1, std::min(threads, blocks));
  const size_t panel = perm ? size_t((columns + 7) / 8) * kTileRows : 0;
  std::vector<uint32_t> panels(panel * threads);  // here: a parallel region must not throw
  parallel(threads, [&](const Team& team) {
    const int from = int(int64_t(blocks) * team.id / team.size), to = int(int64_t(blocks) * (team.id + 1) / team.size);
    for (int b = from; b < to; ++b) unpacker.block(b * kTileRows, std::min(kTileRows, rows - b * kTileRows), panels.data() + panel * team.id);
  });
}

}  // namespace int4moe
