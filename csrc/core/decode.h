// One token of every sequence through all decoder layers, in one parallel region. Module by module a step passes through
// Python some twenty times a layer and wakes the threads ten times; at one token that takes as long as the products.
#pragma once

#include <cstdint>
#include <vector>

#include "core/dense.h"
#include "core/experts.h"
#include "core/layout.h"
#include "isa/kernels.h"

namespace int4moe {

// Rows (sequences) that a step takes at most.
constexpr int kDecodeRows = 32;

// y = x W^T + bias: an int4 linear, or a dense bfloat16 one whose columns are a multiple of 32.
struct DecodeLinear {
  const Layout* layout = nullptr;  // int4: one expert whose only projection is up
  const Kernels* kernels = nullptr;
  const uint8_t* blob = nullptr;
  DenseWeight dense;  // where layout is null
  int rows = 0, columns = 0;
};

// A router with a float32 weight: core/elementwise.h's SigmoidTopK, or TopK without a bias.
struct DecodeFloatRouter {
  const float *weight = nullptr, *bias = nullptr;  // [experts, hidden], [experts] or null
  int groups = 1, top_groups = 1;
  float factor = 1;
};

// Of latent attention, beside DecodeLayer's: q makes heads of `nope` and `turned` elements, k the latent and what is turned,
// k_norm is the latent's; v is not there.
struct DecodeLatentLayer {
  DecodeLinear query;  // with q_norm behind it, what q reads in place of the hidden states; without rows: not there
  const uint16_t *w_key = nullptr, *w_value = nullptr;  // as HeadLinear: [heads, rank, nope], [heads, value_dim, rank]
};

// Attention over rotated heads, then experts behind a router, an MLP, or both; the two with an RMSNorm before and the sum
// with what came in after. Norms are bfloat16, as is the weight of a softmax router.
struct DecodeLayer {
  const uint16_t *input_norm = nullptr, *post_norm = nullptr;  // [hidden]
  float eps = 0;
  DecodeLinear q, k, v, o;
  const uint16_t *q_norm = nullptr, *k_norm = nullptr;  // [head_dim], or null
  bool whole_norms = false;                             // they are of all heads together: [heads * head_dim]
  float head_eps = 0, scale = 0;                        // scale: of the scores
  const uint16_t* router = nullptr;                     // [experts, hidden], of a softmax router; else null
  DecodeFloatRouter float_router;                       // in its place
  bool normalise = false;                               // divide the scores of the chosen by their sum
  FloatType score_type = FloatType::kBFloat16;
  int top_k = 0;        // 0: no experts
  ExpertsArgs experts;  // layout, kernels, blob, activation and one_input
  DecodeLinear gate, up, down;  // down(silu(gate) * up) for every token; without rows: none
  DecodeLatentLayer latent;
  DecodeLinear score;           // [1, hidden]: its sigmoid is the weight of that beside the experts; without rows: 1
};

// Latents of `rank` elements, which all heads share, as the first part of keys and as values; 0: none.
struct DecodeLatentShape {
  int rank = 0, nope = 0, value_dim = 0;  // multiples of 32, 32 and 1
  FloatType tables = FloatType::kBFloat16;  // of cos and sin
  bool apart = true;                        // as in PairRotary
};

struct DecodeShape {
  int hidden = 0, heads = 0, kv_heads = 0, head_dim = 0;  // hidden: a multiple of 32; head_dim: of 16
  bool avx512 = false;  // as in AttentionArgs
  int turned = 0;       // by the rotation, of each head, from its first on
  DecodeLatentShape latent;  // with a rank: head_dim is rank + turned, kv_heads the number of parts that heads attend in
};

// Where one sequence's keys and values of one layer lie: strides in elements by head and token. Room for one more token.
// With latents: these, and what is turned right behind each.
struct DecodeCache {
  uint16_t *keys = nullptr, *values = nullptr;
  int64_t key_stride[2] = {}, value_stride[2] = {};
};

struct DecodeArgs {
  int rows = 0;           // sequences, one token each, 1..kDecodeRows
  uint16_t* hidden = nullptr;  // bfloat16 [rows, hidden], in and out
  const void *cos = nullptr, *sin = nullptr;  // [cos_rows, turned], bfloat16; row r takes row r % cos_rows
  int cos_rows = 1;
  const DecodeCache* caches = nullptr;   // [layers][rows]
  const int64_t* lengths = nullptr;      // [rows]: tokens in a sequence's caches before this step
  int threads = 1;
  double* seconds = nullptr;             // [kDecodeParts] to which to add the time of each part, norms included, or null
};

enum DecodePart { kAttentionPart = 0, kRouterPart = 1, kExpertsPart = 2, kDecodeParts = 3 };

// Needs dense_available(). Keys and values are written behind those there are; the result's bits are those of the single
// operations (rms_norm, linear_forward, rotate, attention, dense_linear, softmax_top_k, experts_forward, gated_silu, add_scaled,
// head_linear, rotate_pairs) in turn.
// Throws std::bad_alloc.
void decode_step(const DecodeShape& shape, const std::vector<DecodeLayer>& layers, const DecodeArgs& args);

}  // namespace int4moe
