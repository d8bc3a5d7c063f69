// Stored words of the checkpoint formats to canonical codes: moves of nibbles, no arithmetic on them.
#pragma once

#include <cstdint>

namespace int4moe {

// How a format lays the 4-bit codes of W [N, K] into 32-bit words.
enum class Packing : int {
  kRows = 0,     // compressed-tensors: [N, ceil(K/8)], nibble i of word r is column 8r+i
  kColumns = 1,  // GPTQ: [K/8, N], nibble i of word r is column 8r+i
  kAwq = 2,      // AWQ gemm: [K, N/8], nibble i of word c is row 8c + {0,2,4,6,1,3,5,7}[i]
};

// codes [N, K/2], low nibble = even column. words is contiguous; K is even (a multiple of 8 for kColumns), N a multiple
// of 8 for kAwq. perm [K] or null: canonical column j is stored column perm[j]; not for kAwq.
void canonical_codes(Packing packing, const uint32_t* words, int rows, int columns, const int32_t* perm, uint8_t* codes,
                     int threads);

}  // namespace int4moe
