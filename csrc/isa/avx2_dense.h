#pragma once

#include <cstdint>

namespace int4moe {
namespace avx2 {

// y[t * rows + n] for n in [first, last): x bfloat16, weights float32, columns a multiple of 32.
void float_rows(int tokens, int64_t first, int64_t last, int64_t rows, int64_t columns, const uint16_t* x, const float* w,
                float* y);

}  // namespace avx2
}  // namespace int4moe
