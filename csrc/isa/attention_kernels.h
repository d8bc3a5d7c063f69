// The kernels of attention, for each width of vectors.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention.h"

namespace int4moe {

// Rows (token, head) that share one pass over the keys.
constexpr int kAttentionRows = 64;
// Heads of a single token that share one pass over its keys.
constexpr int kAttentionHeads = 8;
constexpr int kAttentionKeys = 64;  // of a block, whose scores are kept

struct AttentionKernels {
  // Tokens [first, last) of all heads that belong to one key/value head. `scratch` has attention_rows_floats of them, aligned
  // to 64 bytes.
  void (*attend)(const AttentionArgs& a, int64_t batch, int kv_head, int64_t first, int64_t last, float* scratch);
  // The only token, all heads that belong to one key/value head, and keys [from, to). `result` [attention_run_floats] is for
  // `join_runs`; it and `scratch` [attention_scratch_floats] are aligned to 64 bytes.
  void (*attend_run)(const AttentionArgs& a, int64_t batch, int kv_head, int64_t from, int64_t to, float* result,
                     float* scratch);
  // out = the softmax over all keys, from the results of `runs` runs that follow each other.
  void (*join_runs)(const AttentionArgs& a, int64_t batch, int kv_head, int64_t runs, const float* results, float* scratch);
};

// Vectors of 8 and of 16 floats; the latter take head_dim and value_dim in multiples of 32 alone.
extern const AttentionKernels kAvx2Attention, kAvx512Attention;

// The widest that the arguments ask for and this CPU has (core/attention.cpp).
const AttentionKernels& attention_kernels(const AttentionArgs& a);

// A run's sums [group][value_dim], then maxima [8] and sums of weights [8] for every eight heads: a multiple of 16.
inline int attention_group(const AttentionArgs& a) { return a.heads / a.kv_heads; }
inline int attention_tiles(const AttentionArgs& a) { return (attention_group(a) + kAttentionHeads - 1) / kAttentionHeads; }
inline size_t attention_run_floats(const AttentionArgs& a) {
  return size_t(attention_group(a)) * a.value_dim + size_t(attention_tiles(a)) * 2 * kAttentionHeads;
}

// Of many tokens, for so many rows: a block of keys and values, then of each row its scores, sums, query, maximum and sum of
// weights.
inline size_t attention_rows_floats(const AttentionArgs& a, int64_t rows) {
  const size_t dims = size_t(a.head_dim) + size_t(a.value_dim);
  return (kAttentionKeys * dims + size_t(rows) * (kAttentionKeys + dims + 2) + 15) / 16 * 16;
}

// Scores of a block and the queries, or a weight for each run.
inline size_t attention_scratch_floats(const AttentionArgs& a) {
  const size_t one = size_t(kAttentionHeads) * (kAttentionKeys + a.head_dim);
  const size_t joining = size_t(kAttentionHeads) * size_t(attention_runs(a.keys));
  return ((one > joining ? one : joining) + 15) / 16 * 16;
}

}  // namespace int4moe
