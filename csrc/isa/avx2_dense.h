#pragma once

#include <cstdint>

namespace int4moe {
namespace avx2 {

constexpr int kDenseTile = 3;

// y[t * rows + n] for n in [first, last), t < tokens <= kDenseTile; x float32 in the order of core/dense.cpp.
void dense_rows(int tokens, int64_t first, int64_t last, int64_t rows, int64_t columns, const float* x, const uint16_t* w,
                const uint16_t* bias, uint16_t* y);

}  // namespace avx2
}  // namespace int4moe
