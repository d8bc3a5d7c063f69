// What a decoder layer does between its matrix products, fused: one pass where torch needs eight operators. At one token
// the operators' own cost is most of the time outside the experts. AVX2 only: core/dense.h's dense_available() says so.
#pragma once

#include <cstdint>

#include "isa/kernels.h"

namespace int4moe {

// y[r] = weight * round(x[r] / sqrt(mean(x[r]^2) + eps)), rounded to the type after each step, as transformers' RMSNorm
// does. x and y may be the same rows; both are dense [rows, columns] of `type` (bfloat16 or float32), as is weight.
void rms_norm(FloatType type, int64_t rows, int64_t columns, const void* x, const void* weight, float eps, void* y,
              int threads);

// Rotary position embedding of heads or the first part of each, in place, after an optional RMSNorm of each head.
struct Rotary {
  FloatType type;             // bfloat16 or float32, of x, cos, sin and norm
  int64_t rows;               // batch * tokens
  int heads, head_dim;        // x is dense [rows, heads, head_dim]; head_dim is even
  void* x;
  const void *cos, *sin;      // dense [cos_rows, turned]; row r of x takes row r % cos_rows
  int64_t cos_rows;
  const void* norm;           // [head_dim], or null: no norm
  float eps;
  int turned = head_dim;      // of each head, from its first on; even
};

// x[i] * cos[i] + (i < half ? -x[i + half] : x[i - half]) * sin[i], computed in float32 and rounded once.
void rotate(const Rotary& r, int threads);

constexpr int kMostTurned = 512;

// The same of neighbours, in place: pair i of a head is its elements 2i and 2i + 1.
struct PairRotary {
  FloatType type;             // bfloat16 or float32, of x
  int64_t rows;               // batch * tokens
  int heads, turned;          // elements of each head that are turned: even, at most kMostTurned
  void* x;                    // the first of them
  int64_t stride[2];          // in elements, by row and by head
  FloatType table_type;       // of cos and sin
  const void *cos, *sin;      // row r of x takes row r % cos_rows, which begins `turned` elements behind the one before
  int64_t cos_rows;
  int step;                   // elements from one pair's cosine or sine to the next one's
  bool apart;                 // the result has the first of all pairs, then the second
};

// (a cos - b sin, b cos + a sin) of each pair (a, b), computed in float32 and rounded once.
void rotate_pairs(const PairRotary& r, int threads);

// Softmax over all experts, then the top_k greatest, greatest first (the lower id among equals), of the `top_groups` groups
// of neighbours whose greatest are the greatest.
struct TopK {
  FloatType type;             // of logits [tokens, experts], dense: bfloat16 or float32
  int64_t tokens;
  int experts, top_k;
  const void* logits;
  bool normalise;             // divide by the sum of the chosen
  FloatType score_type;       // of scores [tokens, top_k]: bfloat16 or float32
  void* scores;
  int64_t* ids;               // [tokens, top_k]
  int groups = 1, top_groups = 1;  // top_k experts at least in the latter
  float factor = 1;           // of the scores, in the end
};

void softmax_top_k(const TopK& t, int threads);

// The sigmoid of each expert's logit is its score, and with its bias what it is chosen by: first `top_groups` of the groups
// of neighbours by the sum of the two greatest in each, then the top_k greatest in those (the lower id among equals).
struct SigmoidTopK {
  int64_t tokens;
  int experts, top_k, groups, top_groups;  // at least two experts in a group, top_k in top_groups of them
  const float *logits, *bias;              // [tokens, experts], dense; [experts]
  bool normalise;                          // divide by the sum of the chosen
  float factor;                            // of the scores, in the end
  float* scores;                           // [tokens, top_k]
  int64_t* ids;
};

void sigmoid_top_k(const SigmoidTopK& t, int threads);

// y = round(silu(gate)) * up, rounded; each dense [rows, columns] of `type` (bfloat16 or float32). y may be gate or up.
void gated_silu(FloatType type, int64_t rows, int64_t columns, const void* gate, const void* up, void* y, int threads);

// y[r] = x[r] + round(round(sigmoid(score[r])) * shared[r]), rounded; x, shared and y dense [rows, columns], score [rows].
void add_scaled(FloatType type, int64_t rows, int64_t columns, const void* x, const void* shared, const void* score,
                void* y, int threads);

}  // namespace int4moe
