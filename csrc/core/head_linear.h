// Matrices that each head has of its own, as latent attention needs: of a query into the space in which keys and values are
// kept, and of what was attended to out of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace int4moe {

// y[t, h, n] = sum over k of w[h, n, k] x[t, h, k], all bfloat16, in the order of core/dense.h's dense_linear.
struct HeadLinear {
  int64_t tokens;
  int heads;
  int64_t rows, columns;  // of each head's matrix; columns a multiple of 32
  const uint16_t* x;
  int64_t x_stride[2];    // in elements, by token and head
  const uint16_t* w;      // dense [heads, rows, columns]
  uint16_t* y;
  int64_t y_stride[2];
  bool avx512 = false;    // as in dense_linear
};

// Needs dense_available(). Throws std::bad_alloc.
void head_linear(const HeadLinear& a, int threads);

// Floats that `head_linear_one` needs, aligned to 64 bytes.
size_t head_linear_floats(const HeadLinear& a);

// Rows first..last of one head, for all tokens.
void head_linear_one(const HeadLinear& a, int head, int64_t first, int64_t last, float* scratch);

}  // namespace int4moe
