// One row each, by instruction set; see core/elementwise.h.
#pragma once

#include <cstdint>

#include "core/elementwise.h"

namespace int4moe {

#define INT4MOE_DECLARE_ROWS(NAME)                                                                             \
  namespace NAME {                                                                                             \
  void rms_norm_row(FloatType type, int64_t columns, const void* x, const void* weight, float eps, void* y);   \
  void rotate_one(const Rotary& r, int64_t row);                                                               \
  void top_k_one(const TopK& t, int64_t token);                                                                \
  }
INT4MOE_DECLARE_ROWS(scalar)
INT4MOE_DECLARE_ROWS(avx2)
#undef INT4MOE_DECLARE_ROWS

}  // namespace int4moe
