// A single int4 linear: y = x W^T + bias.
#pragma once

#include "core/layout.h"
#include "isa/kernels.h"

namespace int4moe {

struct LinearArgs {
  const Layout* layout = nullptr;  // one expert whose only projection is up
  const Kernels* kernels = nullptr;
  const uint8_t* blob = nullptr;
  const void* x = nullptr;  // [tokens, K], rows contiguous
  FloatType type = FloatType::kFloat32;
  int64_t tokens = 0, x_stride = 0;  // in elements
  void* y = nullptr;                 // [tokens, N] in the same type
  int64_t y_stride = 0;
  int threads = 1;
};

// Throws std::bad_alloc.
void linear_forward(const LinearArgs& args);

}  // namespace int4moe
