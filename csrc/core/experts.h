// One call per MoE layer: gather, gate/up, activation, down, weighted combine.
#pragma once

#include "core/layout.h"
#include "core/routing.h"
#include "isa/kernels.h"

namespace int4moe {

struct ExpertsArgs {
  const Layout* layout = nullptr;
  const Kernels* kernels = nullptr;
  const uint8_t* blob = nullptr;
  ActivationKind activation = ActivationKind::kSilu;
  float alpha = 0, limit = 0;
  bool one_input = true;  // gate and up of each expert have the same permutation

  const void* x = nullptr;  // [tokens, hidden], rows contiguous
  FloatType type = FloatType::kFloat32;
  int64_t x_stride = 0;  // in elements
  void* y = nullptr;     // [tokens, hidden] in the same type, rows contiguous
  int64_t y_stride = 0;
  int threads = 1;
};

// y[t] = sum over the experts of token t, in ascending order of the expert (equal ids: of the slot), of
// weight * (down(activation(gate(x[t]), up(x[t])))). Every id must have passed find_bad_id. Throws std::bad_alloc.
void experts_forward(const ExpertsArgs& args, const Routing& routing);

}  // namespace int4moe
