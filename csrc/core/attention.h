// Attention of whole heads without a mask, on AVX2: torch's takes 15 times as long for one token over grouped heads.
#pragma once

#include <cstdint>

#include "core/layout.h"

namespace int4moe {

// Strides are in elements: batch, head, token; the last dimension is dense.
struct Heads {
  const void* data;
  int64_t stride[3];
};

struct AttentionArgs {
  FloatType type;          // of q, k, v and out: bfloat16 or float32
  int64_t batch;
  int heads, kv_heads;     // heads is a multiple of kv_heads
  int64_t tokens, keys;    // token t sees the keys up to keys - tokens + t
  int head_dim, value_dim;  // a multiple of 8, a multiple of 16
  Heads q, k, v;
  void* out;               // dense [batch, tokens, heads, value_dim]
  float scale;             // of q k
};

// Whether this CPU has the kernel.
bool attention_available();

// Computed in float32; the result does not depend on the number of threads.
void attention(const AttentionArgs& a, int threads);

}  // namespace int4moe
