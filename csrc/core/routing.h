// Which tokens go to which expert.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/layout.h"

namespace int4moe {

// top_k_index and top_k_weights as the caller has them, [tokens, top_k] with any strides (in elements).
struct Routing {
  const void* ids = nullptr;
  bool wide_ids = true;  // int64, else int32
  int64_t id_stride[2] = {0, 0};
  const void* weights = nullptr;
  FloatType weight_type = FloatType::kFloat32;
  int64_t weight_stride[2] = {0, 0};
  int64_t tokens = 0;
  int top_k = 0;

  int64_t id(int64_t token, int slot) const {
    const int64_t at = token * id_stride[0] + slot * id_stride[1];
    return wide_ids ? static_cast<const int64_t*>(ids)[at] : static_cast<const int32_t*>(ids)[at];
  }
  float weight(int64_t token, int slot) const;
};

// The first (token, slot) whose id is outside -1..experts as token * top_k + slot, or -1 when all are fine.
int64_t find_bad_id(const Routing& r, int experts);

// The assignments of tokens [from, to) sorted by expert; within one expert by token, then slot. Ids of -1 and of
// `experts` are left out. Vectors keep their capacity between calls.
struct Assignments {
  std::vector<int> first;         // [experts + 1]: assignments of expert e are first[e] .. first[e + 1]
  std::vector<int32_t> token;     // relative to `from`
  std::vector<float> weight;
  std::vector<int> active;        // experts that have any, ascending

  void build(const Routing& r, int experts, int64_t from, int64_t to);
  int count() const { return first.empty() ? 0 : first.back(); }
};

}  // namespace int4moe
