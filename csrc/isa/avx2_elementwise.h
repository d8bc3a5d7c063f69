// One row each; see core/elementwise.h.
#pragma once

#include <cstdint>

#include "core/elementwise.h"

namespace int4moe {
namespace avx2 {

void rms_norm_row(FloatType type, int64_t columns, const void* x, const void* weight, float eps, void* y);
void rotate_one(const Rotary& r, int64_t row);
void rotate_pairs_one(const PairRotary& r, int64_t row);
void top_k_one(const TopK& t, int64_t token);
void sigmoid_top_k_one(const SigmoidTopK& t, int64_t token);
void gated_silu(FloatType type, int64_t count, const void* gate, const void* up, void* y);
void add_scaled_row(FloatType type, int64_t columns, const void* x, const void* shared, const void* score, void* y);
// y[i] = round(y[i] + x[i]), bfloat16.
void add_bf16(int64_t count, const uint16_t* x, uint16_t* y);

}  // namespace avx2
}  // namespace int4moe
