#include "core/pack.h"

#include <algorithm>
#include <cstring>

#include "core/threads.h"

namespace int4moe {

namespace {

// Nibbles of a canonical word are columns 0..7 from the low bits; of a packed lane 0,4,1,5,2,6,3,7. Both directions
// swap bits of the nibble index (abc -> bca and back), as three exchanges of bit fields.
uint32_t exchange(uint32_t v, uint32_t mask, int shift) {
  const uint32_t t = (v ^ (v >> shift)) & mask;
  return v ^ t ^ (t << shift);
}

uint32_t to_lane(uint32_t word) {
  // [0 1 2 3 | 4 5 6 7] -> swap middle pairs of bytes -> [0 1 4 5 | 2 3 6 7] -> swap middle nibbles of halves
  word = exchange(word, 0x0000ff00u, 8);
  return exchange(word, 0x00f000f0u, 4);
}

uint32_t from_lane(uint32_t lane) {
  lane = exchange(lane, 0x00f000f0u, 4);
  return exchange(lane, 0x0000ff00u, 8);
}

struct Span {
  int from, to;
};

Span share(const Team& team, int blocks) {
  return {int(int64_t(blocks) * team.id / team.size), int(int64_t(blocks) * (team.id + 1) / team.size)};
}

void pack_block_codes(const Dims& d, int block, const uint8_t* codes, const int32_t* row_perm, uint8_t* out) {
  const int lines = d.lines(), full = d.columns / kLineColumns;
  const size_t row_bytes = size_t(d.columns) / 2;
  for (int r = 0; r < kBlockRows; ++r) {
    const int row = block * kBlockRows + r;
    auto* lane = reinterpret_cast<uint32_t*>(out) + r;
    if (row >= d.rows) {
      for (int l = 0; l < lines; ++l) lane[size_t(l) * kBlockRows] = 0;
      continue;
    }
    const uint8_t* src = codes + size_t(row_perm ? row_perm[row] : row) * row_bytes;
    for (int l = 0; l < full; ++l) {
      uint32_t word;
      std::memcpy(&word, src + size_t(l) * 4, 4);
      lane[size_t(l) * kBlockRows] = to_lane(word);
    }
    if (full < lines) {
      uint32_t word = 0;
      std::memcpy(&word, src + size_t(full) * 4, row_bytes - size_t(full) * 4);
      lane[size_t(full) * kBlockRows] = to_lane(word);
    }
  }
}

// The canonical row that packed row r of a block comes from; -1 for padding.
int64_t source_row(const Dims& d, int block, int r, const int32_t* row_perm) {
  const int row = block * kBlockRows + r;
  return row >= d.rows ? -1 : row_perm ? row_perm[row] : row;
}

template <class T>
void pack_block_scales(const Dims& d, int block, const uint8_t* scales, const int32_t* row_perm, uint8_t* out) {
  const size_t groups = size_t(d.groups());
  for (int r = 0; r < kBlockRows; ++r) {
    const int64_t row = source_row(d, block, r, row_perm);
    const uint8_t* src = scales + size_t(row < 0 ? 0 : row) * groups * sizeof(T);
    uint8_t* dst = out + size_t(r) * sizeof(T);
    for (size_t g = 0; g < groups; ++g, src += sizeof(T), dst += kBlockRows * sizeof(T)) {
      T bits = 0;
      if (row >= 0) std::memcpy(&bits, src, sizeof(T));
      std::memcpy(dst, &bits, sizeof(T));
    }
  }
}

void pack_block_zeros(const Dims& d, int block, const uint8_t* zeros, const int32_t* row_perm, uint8_t* out) {
  const size_t groups = size_t(d.groups()), step = kBlockRows / 2;
  for (int r = 0; r < kBlockRows; r += 2) {
    const int64_t even = source_row(d, block, r, row_perm), odd = source_row(d, block, r + 1, row_perm);
    const auto zero = [&](int64_t row, size_t g) { return row < 0 ? 0 : zeros ? zeros[size_t(row) * groups + g] : 8; };
    for (size_t g = 0; g < groups; ++g) out[g * step + size_t(r / 2)] = uint8_t(zero(even, g) | zero(odd, g) << 4);
  }
}

void unpack_block_codes(const Dims& d, int block, const uint8_t* in, const int32_t* row_perm, uint8_t* codes) {
  const int lines = d.lines();
  const size_t row_bytes = size_t(d.columns) / 2;
  for (int r = 0; r < kBlockRows && block * kBlockRows + r < d.rows; ++r) {
    const int row = block * kBlockRows + r;
    const auto* lane = reinterpret_cast<const uint32_t*>(in) + r;
    uint8_t* dst = codes + size_t(row_perm ? row_perm[row] : row) * row_bytes;
    for (int l = 0; l < lines; ++l) {
      const uint32_t word = from_lane(lane[size_t(l) * kBlockRows]);
      std::memcpy(dst + size_t(l) * 4, &word, std::min<size_t>(4, row_bytes - size_t(l) * 4));
    }
  }
}

}  // namespace

void pack(const Layout& layout, uint8_t* blob, int expert, Projection p, const Canonical& from, const int32_t* row_perm,
          int threads) {
  const Dims& d = layout.dims(p);
  const Offsets& o = layout.offsets(p);
  uint8_t* base = blob + layout.expert_bytes() * size_t(expert);
  const int groups = d.groups();
  const size_t element = scale_bytes(d.scale_type);
  parallel(std::min(threads, d.blocks()), [&](const Team& team) {
    const Span mine = share(team, d.blocks());
    for (int b = mine.from; b < mine.to; ++b) {
      pack_block_codes(d, b, from.codes, row_perm, base + o.codes + size_t(b) * d.lines() * kLineBytes);
      uint8_t* scales = base + o.scales + size_t(b) * groups * kBlockRows * element;
      if (element == 2) {
        pack_block_scales<uint16_t>(d, b, from.scales, row_perm, scales);
      } else {
        pack_block_scales<uint32_t>(d, b, from.scales, row_perm, scales);
      }
      if (d.zeros) {
        pack_block_zeros(d, b, from.zeros, row_perm, base + o.zeros + size_t(b) * groups * (kBlockRows / 2));
      }
    }
  });
  auto* flags = reinterpret_cast<int32_t*>(base + layout.flags_offset());
  const bool without = d.zeros && !from.zeros;
  *flags = without ? *flags | 1 << p : *flags & ~(1 << p);
  if (d.bias) {
    auto* bias = reinterpret_cast<float*>(base + o.bias);
    for (int n = 0; n < d.rows; ++n) bias[n] = from.bias[row_perm ? row_perm[n] : n];
  }
  if (d.perm) {
    auto* perm = reinterpret_cast<int32_t*>(base + o.perm);
    for (int k = 0; k < d.columns; ++k) perm[k] = from.perm ? from.perm[k] : -1;
  }
}

bool unpack(const Layout& layout, const uint8_t* blob, int expert, Projection p, const Canonical& to,
            const int32_t* row_perm, int threads) {
  const Dims& d = layout.dims(p);
  const Offsets& o = layout.offsets(p);
  const uint8_t* base = blob + layout.expert_bytes() * size_t(expert);
  const int groups = d.groups();
  const size_t element = scale_bytes(d.scale_type);
  parallel(std::min(threads, d.blocks()), [&](const Team& team) {
    const Span mine = share(team, d.blocks());
    for (int b = mine.from; b < mine.to; ++b) {
      if (to.codes) unpack_block_codes(d, b, base + o.codes + size_t(b) * d.lines() * kLineBytes, row_perm, to.codes);
      const uint8_t* scales = base + o.scales + size_t(b) * groups * kBlockRows * element;
      const uint8_t* zeros = d.zeros ? base + o.zeros + size_t(b) * groups * (kBlockRows / 2) : nullptr;
      for (int r = 0; r < kBlockRows && b * kBlockRows + r < d.rows; ++r) {
        const int row = b * kBlockRows + r;
        const size_t dst = size_t(row_perm ? row_perm[row] : row) * groups;
        for (int g = 0; g < groups; ++g) {
          if (to.scales) {
            std::memcpy(to.scales + (dst + g) * element, scales + (size_t(g) * kBlockRows + r) * element, element);
          }
          if (to.zeros) to.zeros[dst + g] = zeros ? (zeros[g * (kBlockRows / 2) + r / 2] >> (r % 2 * 4)) & 15 : 8;
        }
      }
    }
  });
  if (d.bias && to.bias) {
    const auto* bias = reinterpret_cast<const float*>(base + o.bias);
    for (int n = 0; n < d.rows; ++n) to.bias[row_perm ? row_perm[n] : n] = bias[n];
  }
  if (d.perm && to.perm) std::memcpy(to.perm, base + o.perm, size_t(d.columns) * 4);
  return d.zeros && !(*reinterpret_cast<const int32_t*>(base + layout.flags_offset()) & 1 << p);
}

}  // namespace int4moe
