// Canonical weights to the packed layout and back, bit for bit.
#pragma once

#include "core/layout.h"

namespace int4moe {

// A CanonicalWeight (int4moe_ipex/canonical.py), contiguous. Pointers that a direction does not use may be null.
struct Canonical {
  uint8_t* codes = nullptr;   // [N, K/2], low nibble = even column
  uint8_t* scales = nullptr;  // [N, G] in dims.scale_type
  uint8_t* zeros = nullptr;   // [N, G] one byte each; null while packing into dims.zeros: every zero point is 8
  float* bias = nullptr;      // [N]
  int32_t* perm = nullptr;    // [K]; null while packing into dims.perm: the identity
};

// Writes projection p of one expert. row_perm [N] or null: packed row j is canonical row row_perm[j].
void pack(const Layout& layout, uint8_t* blob, int expert, Projection p, const Canonical& from, const int32_t* row_perm,
          int threads);

// Reads it back; fills every non-null pointer of `to`. Says whether the projection came with zero points.
bool unpack(const Layout& layout, const uint8_t* blob, int expert, Projection p, const Canonical& to,
            const int32_t* row_perm, int threads);

}  // namespace int4moe
