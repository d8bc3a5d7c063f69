// Attention of whole heads without a mask, on AVX2 and AVX-512: torch's takes ten times as long for one token over grouped
// heads.
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
  bool avx512 = false;     // vectors of 512 bits, where this CPU has them and the sizes allow
};

// The attention of a single token is computed in runs of so many keys, whatever the number of threads, so that many threads
// share a long context between them.
constexpr int64_t kAttentionRun = 256;

inline int64_t attention_runs(int64_t keys) { return (keys + kAttentionRun - 1) / kAttentionRun; }

// Whether this CPU has the kernel.
bool attention_available();

// Computed in float32; the result does not depend on the number of threads.
void attention(const AttentionArgs& a, int threads);

}  // namespace int4moe
