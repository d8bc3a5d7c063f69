#include "core/decode_router.h"

#include "core/elementwise.h"
#include "isa/avx2_elementwise.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

Routing choose_experts(const DecodeLayer& l, int rows, const DecodeLogits& logits, const DecodeChoice& choice) {
  const DecodeFloatRouter& f = l.float_router;
  const int experts = l.experts.layout->experts();
  const FloatType type = l.router ? FloatType::kBFloat16 : FloatType::kFloat32;
  const void* given = l.router ? static_cast<const void*>(logits.narrow) : logits.wide;
  const TopK top{type, rows, experts, l.top_k, given, l.normalise, l.score_type, choice.scores, choice.ids, f.groups, f.top_groups, f.factor};
  const SigmoidTopK other{rows, experts, l.top_k, f.groups, f.top_groups, logits.wide, f.bias, l.normalise, f.factor, choice.scores, choice.ids};
  for (int r = 0; r < rows; ++r) f.bias ? avx2::sigmoid_top_k_one(other, r) : avx2::top_k_one(top, r);
  Routing routing;
  routing.ids = choice.ids;
  routing.id_stride[0] = routing.weight_stride[0] = l.top_k;
  routing.id_stride[1] = routing.weight_stride[1] = 1;
  routing.weights = choice.scores;
  routing.weight_type = l.score_type;
  routing.tokens = rows;
  routing.top_k = l.top_k;
  return routing;
}

#endif

}  // namespace int4moe
