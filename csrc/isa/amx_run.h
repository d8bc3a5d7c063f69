// The loop of the AMX rows: one call of `multiply` as a sequence of visits, each of one segment of a pass's blocks for one
// or two tiles of tokens.
//
// Everything that is not a tile product is vector work, and is placed between the products of a visit so that it runs
// while the tile unit is busy: codes of the next segment are decoded, rows of the next visit's tokens are brought together,
// and the sums of the visit before are scaled and added to the totals. Whatever a tile is loaded from, or a sum is read
// from, was written a visit ago. The order below is the order in the program: see benchmarks/cost_model.md for what it is
// expected to give.
#pragma once

#include "isa/amx_common.h"

namespace int4moe {
namespace amx {
namespace {

// What a row T brings:
//   kPlanes                     tiles of activations for the same tokens: 1, or 2
//   segment_lines(m)            the longest segment
//   values_at(m, segment)       where its activations lie in a row: tiles * kPlanes * 64 bytes
//   pair_at(m, segment)         where 8 bytes lie that scaling a token's sums needs
//   decode(...), block(...)     a tile of weights, and what scaling the sums of a block needs
//   kind(m, segment), has(kind) how its sums are scaled and added
//   Token, Add<kind>            that for one token, for one block
//   kParts                      whether sums of several segments come together before they are added to the totals
template <class T>
class Run {
  static constexpr int kVisitTiles = 2 / T::kPlanes;  // tiles of tokens
  static constexpr int kVisitRows = kVisitTiles * kTileTokens;

  // A segment once it is decoded. Three in turn: sums of the one before may still be pending while the next is decoded.
  struct Decoded {
    Segment segment;
    const uint8_t* weights;
    size_t values_at, pair_at;
    typename T::Block block[kBlocks];
  };

  // Three in turn: the one that is multiplied, the one before, whose sums are added, and the next one.
  struct Visit {
    const Decoded* of = nullptr;
    const uint8_t* weights = nullptr;
    const uint8_t* x = nullptr;  // its activations, `stride` between tokens
    const uint8_t* pairs = nullptr;
    size_t stride = 0, pair_stride = 0;
    uint8_t* sums = nullptr;
    float *total = nullptr, *part = nullptr;
    const int32_t* index = nullptr;
    int count = 0, second = 0;  // tokens, those of the first tile
    int tiles = 0, blocks = 0, kind = 0;
    alignas(64) uint8_t pairs_of[kVisitRows][8];
  };

  struct Scratch {
    alignas(64) uint8_t weights[2][2 * kSegmentTiles * kTileBytes];  // tiles of the two blocks of a pair in turn
    alignas(64) uint8_t values[2][2 * kSegmentTiles * kTileBytes];
    alignas(64) uint8_t sums[2][kBlocks * 2 * kTileBytes];
    alignas(64) float parts[T::kParts ? kMostTokens : 1][kBlocks * kBlockRows];
  };

 public:
  Run(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride, const uint8_t* next)
      : m_(m),
        rows_(rows),
        tiles_((rows.count + kTileTokens - 1) / kTileTokens),
        least_(rows.count / tiles_),
        larger_(rows.count % tiles_),
        out_(out),
        out_stride_(out_stride),
        first_(first),
        walk_(m, first, blocks, T::segment_lines(m), next) {}

  void all() {
    const TileState state(least_ + (larger_ > 0));
    const int visits = (tiles_ + kVisitTiles - 1) / kVisitTiles;
    Segment segment;
    if (!walk_.next(segment)) return;
    begin_decoding(segment);
    decode(kBlocks * kSegmentTiles);
    begin_segment();
    Visit *before = &visits_[0], *now = &visits_[1], *next = &visits_[2];
    begin_visit(*next);
    gather(*next);
    for (bool more = true; more;) {
      more = walk_.next(segment);
      if (more) begin_decoding(segment);
      units_ = more ? (segment.blocks * segment.tiles + visits - 1) / visits : 0;
      for (int v = 1; v <= visits; ++v) {
        Visit* const done = before;
        before = now;
        now = next;
        next = done;
        next->count = 0;
        if (before->count && before->blocks != now->blocks) add_rest(*before);
        if (v < visits) {
          begin_visit(*next);
        } else if (more) {
          begin_segment();
          begin_visit(*next);
        }
        multiply(*before, *now, *next);
      }
      if (more) decode(kBlocks * kSegmentTiles);
    }
    add_rest(*now);
  }

 private:
  void begin_decoding(const Segment& s) {
    decoding_ = decoding_ == 2 ? 0 : decoding_ + 1;
    Decoded& d = decoded_[decoding_];
    d.segment = s;
    d.weights = scratch_.weights[weights_ ^= 1];
    d.values_at = T::values_at(m_, s);
    d.pair_at = T::pair_at(m_, s);
    fetch_ = walk_.fetch(s);
    unit_block_ = unit_line_ = 0;
    codes_from_ = m_.block_codes(s.block) + size_t(s.line) * kLineBytes;
    tile_to_ = scratch_.weights[weights_];
  }

  // Decodes up to `units` more tiles of weights.
  INT4MOE_APART void decode(int units) {
    Decoded& d = decoded_[decoding_];
    const int lines = d.segment.lines, blocks = d.segment.blocks;
    int b = unit_block_, line = unit_line_;
    const uint8_t* from = codes_from_;
    uint8_t* to = tile_to_;
    __m512i codes = codes_;
    for (; units > 0 && b < blocks; --units) {
      const int left = lines - line;
      const __m512i sum = T::decode(m_, d.segment, b, from, left, fetch_(d.segment.line + line), to);
      codes = line ? _mm512_add_epi32(codes, sum) : sum;
      from += kTileLines * kLineBytes;
      to += 2 * kTileBytes;
      line += kTileLines;
      if (left > kTileLines) continue;
      d.block[b] = T::block(m_, d.segment, b, codes);
      ++b;
      line = 0;
      from += ptrdiff_t(m_.lines) * kLineBytes - d.segment.tiles * kTileLines * kLineBytes;
      to = scratch_.weights[weights_] + ((b & ~1) * d.segment.tiles + (b & 1)) * kTileBytes;
    }
    unit_block_ = b;
    unit_line_ = line;
    codes_from_ = from;
    tile_to_ = to;
    codes_ = codes;
  }

  // Visits from now on are of the segment that was decoded last, from its first tokens on.
  void begin_segment() {
    of_ = &decoded_[decoding_];
    tile_ = from_ = 0;
    total_ = out_ + size_t(of_->segment.block - first_) * kBlockRows;
  }

  // Tokens are cut into tiles as evenly as possible, the larger ones last: all can be loaded as tall as the tallest.
  INT4MOE_INLINE int tile_tokens(int tile) const { return least_ + (tile >= tiles_ - larger_); }

  INT4MOE_INLINE void begin_visit(Visit& v) {
    v.of = of_;
    v.weights = of_->weights;
    v.tiles = of_->segment.tiles;
    v.blocks = of_->segment.blocks;
    v.kind = T::kind(m_, of_->segment);
    v.total = total_;
    v.part = scratch_.parts[T::kParts ? from_ : 0];
    v.count = v.second = tile_tokens(tile_);
    if (kVisitTiles == 2 && tile_ + 1 < tiles_) v.count += tile_tokens(tile_ + 1);
    v.sums = scratch_.sums[half_ ^= 1];
    if (rows_.index) {
      // Rows of different tokens lie apart: this segment of them will be brought together.
      v.index = rows_.index + from_;
      v.x = scratch_.values[half_];
      v.stride = size_t(of_->segment.tiles * T::kPlanes * 64);
      v.pairs = v.pairs_of[0];
      v.pair_stride = 8;
    } else {
      const uint8_t* row = rows_.at(from_);
      v.x = row + of_->values_at;
      v.stride = v.pair_stride = rows_.stride;
      v.pairs = row + of_->pair_at;
    }
    tile_ += kVisitTiles;
    from_ += v.count;
    total_ += size_t(v.count) * out_stride_;
  }

  // Brings the rows of the next visit together.
  INT4MOE_APART void gather(Visit& v) {
    if (!rows_.index || !v.count) return;
    switch (v.stride) {
      case 64:
        return gather_rows<64>(v);
      case 128:
        return gather_rows<128>(v);
      case 256:
        return gather_rows<256>(v);
      default:
        return gather_rows<0>(v);
    }
  }

  template <size_t kBytes>
  INT4MOE_INLINE void gather_rows(Visit& v) {
    const size_t across = v.of->pair_at - v.of->values_at, stride = rows_.stride, bytes = v.stride;
    const uint8_t* values = rows_.data + v.of->values_at;
    const int32_t *index = v.index, *end = index + v.count;
    uint8_t *to = scratch_.values[half_], *pairs_to = v.pairs_of[0];
    for (; index != end; ++index, pairs_to += 8) {
      const uint8_t* from = values + stride * size_t(uint32_t(*index));
      __builtin_memcpy(pairs_to, from + across, 8);
      if constexpr (kBytes) {
#pragma GCC unroll 4
        for (size_t j = 0; j < kBytes; j += 64) _mm512_store_si512(to + j, _mm512_loadu_si512(from + j));
        to += kBytes;
      } else {
        const uint8_t* stop = to + bytes;
        for (; to != stop; to += 64, from += 64) _mm512_store_si512(to, _mm512_loadu_si512(from));
      }
    }
  }

  // Scales and adds the sums of a visit, some rows at a time.
  template <int B, int K>
  struct Adding {
    const uint8_t *sums, *end, *pairs;
    float *total, *part;
    const size_t pair_stride, out_stride;
    typename T::template Add<K> add[B];

    INT4MOE_INLINE Adding(const Visit& v, size_t stride)
        : sums(v.sums), end(v.sums + size_t(v.count) * 64), pairs(v.pairs), total(v.total), part(v.part),
          pair_stride(v.pair_stride), out_stride(stride) {
      in_order();
      if (!v.count) return;
#pragma GCC unroll 4
      for (int b = 0; b < B; ++b) add[b].set(v.of->block[b]);
    }

    INT4MOE_INLINE void rows(const uint8_t* to) {
#pragma GCC unroll 1
      while (sums != to) {
        const typename T::Token token(pairs);
#pragma GCC unroll 4
        for (int b = 0; b < B; ++b) {
          add[b].row(sums + b * 2 * kTileBytes, token, total + b * kBlockRows, part + b * kBlockRows);
        }
        sums += 64;
        pairs += pair_stride;
        total += out_stride;
        part += kBlocks * kBlockRows;
      }
      in_order();
    }
  };

  // N tiles of activations, B blocks; K: the kind of the sums that are added meanwhile. These come from the tile unit
  // only a while after its last product, so the first half of the products goes with decoding and gathering.
  template <int N, int B, int K>
  INT4MOE_APART void multiply(const Visit& before, const Visit& v, Visit& next) {
    constexpr int kPair = B > 1 ? 2 : 1, kPairs = B / kPair, kWeights = 2 * kTileBytes, kValues = T::kPlanes * 64;
    const size_t stride = v.stride, across = T::kPlanes == 1 ? size_t(v.second) * stride : 64;
    const int tiles = v.tiles, second = T::kPlanes == 1 ? v.second * 64 : kTileBytes;
    const uint8_t *w = v.weights, *x = v.x;
    uint8_t* sums = v.sums;
    int front = kPairs > 1 || tiles == 1 ? tiles : tiles / 2, back = kPairs > 1 ? tiles : tiles - front;
    start_sums<N, kPair>();
    products<N, kPair>(w, x, x + across, stride, [] {});
    if (units_) decode(units_);
    if (--front) {
      w += kWeights;
      x += kValues;
      products<N, kPair>(w, x, x + across, stride, [] {});
      --front;
    }
    gather(next);
    for (; front; --front) {
      w += kWeights;
      x += kValues;
      products<N, kPair>(w, x, x + across, stride, [] {});
    }
    if constexpr (kPairs > 1) {
      store_sums<N, kPair>(sums, second);
      sums += 4 * kTileBytes;
      x = v.x - kValues;
      start_sums<N, kPair>();
    }
    Adding<B, K> adding(before, out_stride_);
    const uint8_t* to = adding.sums;
    const ptrdiff_t step = back ? before.count / (N * kPair * back) * 64 : 0;
    for (; back; --back) {
      w += kWeights;
      x += kValues;
      products<N, kPair>(w, x, x + across, stride, [&]() __attribute__((always_inline)) { adding.rows(to += step); });
    }
    store_sums<N, kPair>(sums, second);
    adding.rows(adding.end);
  }

// DO(kind) for the kind of the sums that are to be added.
#define INT4MOE_KIND(DO, K) \
  case K:                   \
    DO(K);                  \
    break;
#define INT4MOE_KINDS(DO)                                                                      \
  switch (before.count ? before.kind : 0) {                                                    \
    INT4MOE_KIND(DO, 0) INT4MOE_KIND(DO, 1) INT4MOE_KIND(DO, 2) INT4MOE_KIND(DO, 4)            \
    INT4MOE_KIND(DO, 5) INT4MOE_KIND(DO, 8) INT4MOE_KIND(DO, 9)                                \
  }

  template <int N, int B>
  INT4MOE_INLINE void multiply(const Visit& before, const Visit& v, Visit& next) {
#define INT4MOE_DO(K) \
  if constexpr (T::has(K)) multiply<N, B, K>(before, v, next)
    INT4MOE_KINDS(INT4MOE_DO)
#undef INT4MOE_DO
  }

  template <int B>
  INT4MOE_INLINE void multiply(const Visit& before, const Visit& v, Visit& next) {
    if (T::kPlanes == 2 || v.second < v.count) return multiply<2, B>(before, v, next);
    if constexpr (T::kPlanes == 1) multiply<1, B>(before, v, next);
  }

  INT4MOE_INLINE void multiply(const Visit& before, const Visit& v, Visit& next) {
    switch (v.blocks) {
      case 4:
        return multiply<4>(before, v, next);
      case 2:
        return multiply<2>(before, v, next);
      default:
        return multiply<1>(before, v, next);
    }
  }

  template <int B, int K>
  INT4MOE_INLINE void add_rest(const Visit& before) {
    Adding<B, K> adding(before, out_stride_);
    adding.rows(adding.end);
  }

  template <int B>
  INT4MOE_INLINE void add_rest(const Visit& before) {
#define INT4MOE_DO(K) \
  if constexpr (T::has(K)) add_rest<B, K>(before)
    INT4MOE_KINDS(INT4MOE_DO)
#undef INT4MOE_DO
  }

  // Where the next visit has another number of blocks, and at the end.
  INT4MOE_APART void add_rest(Visit& before) {
    switch (before.blocks) {
      case 4:
        add_rest<4>(before);
        break;
      case 2:
        add_rest<2>(before);
        break;
      default:
        add_rest<1>(before);
    }
    before.count = 0;
  }
#undef INT4MOE_KINDS
#undef INT4MOE_KIND

  Scratch scratch_;
  const Matrix& m_;
  const Rows rows_;
  const int tiles_, least_, larger_;
  float* const out_;
  const size_t out_stride_;
  const int first_;
  Walk walk_;
  Decoded decoded_[3];
  Visit visits_[3];
  // Where the next visit begins.
  const Decoded* of_ = nullptr;
  float* total_ = nullptr;
  int tile_ = 0, from_ = 0, half_ = 0;
  // The next tile to decode.
  avx512::Ahead fetch_{m_, nullptr, nullptr};
  __m512i codes_ = _mm512_setzero_si512();
  const uint8_t* codes_from_ = nullptr;
  uint8_t* tile_to_ = nullptr;
  int decoding_ = 2, weights_ = 0, unit_block_ = 0, unit_line_ = 0, units_ = 0;
};

}  // namespace
}  // namespace amx
}  // namespace int4moe
