// Which experts a decoding step (core/decode.h) goes to.
#pragma once

#include <cstdint>

#include "core/decode.h"
#include "core/routing.h"

namespace int4moe {

// Dense [rows, experts]: those of a router with a bfloat16 weight, or of one with a float32 weight.
struct DecodeLogits {
  const uint16_t* narrow;
  const float* wide;
};

// Dense [rows, top_k], to be written; scores of the layer's score_type.
struct DecodeChoice {
  float* scores;
  int64_t* ids;
};

// Chooses for every row, and what was chosen as the experts' driver takes it.
Routing choose_experts(const DecodeLayer& l, int rows, const DecodeLogits& logits, const DecodeChoice& choice);

}  // namespace int4moe
