// One row each; see core/elementwise.h.
#pragma once

#include <cstdint>

#include "core/elementwise.h"

namespace int4moe {
namespace avx2 {

void rms_norm_row(FloatType type, int64_t columns, const void* x, const void* weight, float eps, void* y);
void rotate_one(const Rotary& r, int64_t row);
void top_k_one(const TopK& t, int64_t token);

}  // namespace avx2
}  // namespace int4moe
