// Dense bfloat16 linears for a few tokens: bound by reading the weight once, which torch's product does not reach.
#pragma once

#include <cstdint>

namespace int4moe {

// Tokens that `dense_linear` takes at most: as many as a step has sequences (core/decode.h).
constexpr int kDenseTokens = 32;

bool dense_available();

// y[t, n] = sum over k of w[n, k] x[t, k] + (bias ? bias[n] : 0), all bfloat16 and dense, sums in float32 in an order that
// depends on nothing but k. tokens <= kDenseTokens, columns a multiple of 32.
void dense_linear(int tokens, int64_t rows, int64_t columns, const uint16_t* x, const uint16_t* w, const uint16_t* bias,
                  uint16_t* y, int threads);

// y[t, n] = sum over k of w[n, k] x[t, k]: x bfloat16, w and y float32, all dense. For few tokens, as many as a step has.
void float_linear(int tokens, int64_t rows, int64_t columns, const uint16_t* x, const float* w, float* y, int threads);

}  // namespace int4moe
