// Dense bfloat16 linears for a few tokens: bound by reading the weight once, which torch's product does not reach.
#pragma once

#include <cstdint>

namespace int4moe {

// Tokens that `dense_linear` takes at most: as many as a step has sequences (core/decode.h).
constexpr int kDenseTokens = 32;

struct CompactWords;  // core/compact.h

// [rows, columns] of bfloat16, columns a multiple of 32: as they are, or in 12 bits each.
struct DenseWeight {
  const uint16_t* words = nullptr;
  const CompactWords* compact = nullptr;
  const uint16_t* bias = nullptr;  // [rows], or null
  int64_t rows = 0, columns = 0;
};

bool dense_available();

// y[t, n] = sum over k of w[n, k] x[t, k] + bias[n], all bfloat16 and dense, sums in float32 in an order that depends on
// nothing but the weight. tokens <= kDenseTokens. avx512: vectors of 512 bits where this CPU has them. Throws std::bad_alloc.
void dense_linear(const DenseWeight& w, int tokens, const uint16_t* x, uint16_t* y, bool avx512, int threads);

// y[t, n] = sum over k of w[n, k] x[t, k]: x bfloat16, w and y float32, all dense. For few tokens, as many as a step has.
void float_linear(int tokens, int64_t rows, int64_t columns, const uint16_t* x, const float* w, float* y, int threads);

}  // namespace int4moe
