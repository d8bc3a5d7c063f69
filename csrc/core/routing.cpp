#include "core/routing.h"

#include "isa/float_bits.h"

namespace int4moe {

float Routing::weight(int64_t token, int slot) const {
  const int64_t at = token * weight_stride[0] + slot * weight_stride[1];
  switch (weight_type) {
    case FloatType::kFloat16:
      return fp16_to_float(static_cast<const uint16_t*>(weights)[at]);
    case FloatType::kBFloat16:
      return bf16_to_float(static_cast<const uint16_t*>(weights)[at]);
    case FloatType::kFloat32:
      return static_cast<const float*>(weights)[at];
    default:
      return float(static_cast<const double*>(weights)[at]);
  }
}

int64_t find_bad_id(const Routing& r, int experts) {
  for (int64_t t = 0; t < r.tokens; ++t) {
    for (int s = 0; s < r.top_k; ++s) {
      const int64_t id = r.id(t, s);
      if (id < -1 || id > experts) return t * r.top_k + s;
    }
  }
  return -1;
}

void Assignments::build(const Routing& r, int experts, int64_t from, int64_t to) {
  first.assign(size_t(experts) + 1, 0);
  active.clear();
  for (int64_t t = from; t < to; ++t) {
    for (int s = 0; s < r.top_k; ++s) {
      const int64_t id = r.id(t, s);
      if (id >= 0 && id < experts) ++first[size_t(id) + 1];
    }
  }
  for (int e = 0; e < experts; ++e) {
    if (first[size_t(e) + 1]) active.push_back(e);
    first[size_t(e) + 1] += first[size_t(e)];
  }
  const auto total = size_t(first[size_t(experts)]);
  // Each by itself: the second may find no memory, and the next call what the first got.
  if (token.size() < total) token.resize(total);
  if (weight.size() < total) weight.resize(total);
  // first[e] serves as the cursor of expert e and ends up at first[e + 1]; shifted back afterwards.
  for (int64_t t = from; t < to; ++t) {
    for (int s = 0; s < r.top_k; ++s) {
      const int64_t id = r.id(t, s);
      if (id < 0 || id >= experts) continue;
      const auto at = size_t(first[size_t(id)]++);
      token[at] = int32_t(t - from);
      weight[at] = r.weight(t, s);
    }
  }
  for (int e = experts; e > 0; --e) first[size_t(e)] = first[size_t(e) - 1];
  first[0] = 0;
}

}  // namespace int4moe
