#pragma once

#include <cstdint>

namespace int4moe {
namespace avx2 {

// Bfloat16 to float32, count a multiple of 16, dst aligned to 32 bytes: of each 16 the even ones before the odd ones, the
// order in which a shift and a mask take weights apart.
void widen(int64_t count, const uint16_t* x, float* dst);

// y[t * rows + n] for n in [first, last), t < tokens; x as `widen` wrote it.
void dense_rows(int tokens, int64_t first, int64_t last, int64_t rows, int64_t columns, const float* x, const uint16_t* w,
                const uint16_t* bias, uint16_t* y);

// y[t * rows + n] for n in [first, last): x bfloat16, weights float32, columns a multiple of 32.
void float_rows(int tokens, int64_t first, int64_t last, int64_t rows, int64_t columns, const uint16_t* x, const float* w,
                float* y);

}  // namespace avx2
}  // namespace int4moe
