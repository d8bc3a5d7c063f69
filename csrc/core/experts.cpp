#include "core/experts.h"

#include <algorithm>
#include <vector>

#include "core/experts_pass.h"
#include "core/threads.h"
#include "core/workspace.h"

namespace int4moe {

namespace {

// Tokens of one pass and bytes of scratch it may use: beyond, the layer runs in several passes.
constexpr int64_t kPassTokens = 1024;
constexpr size_t kPassBytes = size_t(256) << 20;

int64_t tokens_per_pass(const ExpertsArgs& a, const Routing& r) {
  const Layout& l = *a.layout;
  const bool permuted = l.dims(kUp).perm || l.dims(kGate).perm;
  const size_t inner = size_t(l.dims(kUp).rows) * 8, outer = size_t(l.dims(kUp).columns) * 4 * (a.one_input ? 1 : 2);
  const size_t per_token = size_t(r.top_k) * (inner + (permuted ? outer : 0)) + outer;
  const auto fit = int64_t(kPassBytes / std::max<size_t>(per_token, 1));
  const int64_t most = std::max<int64_t>(std::min(kPassTokens, fit), 16);
  const int64_t passes = (r.tokens + most - 1) / most;
  return (r.tokens + passes - 1) / passes;
}

}  // namespace

void experts_forward(const ExpertsArgs& args, const Routing& routing) {
  if (routing.tokens == 0) return;
  static thread_local Assignments work;
  static thread_local std::vector<ExpertsItem> items;
  Workspace workspace;
  const int64_t step = tokens_per_pass(args, routing);
  for (int64_t from = 0; from < routing.tokens; from += step) {
    const int64_t to = std::min(routing.tokens, from + step);
    work.build(routing, args.layout->experts(), from, to);
    ExpertsPass pass(args, work, items, from, to);
    pass.carve(workspace.reserve(pass.carve(nullptr)));
    pass.reset();
    parallel(pass.useful_threads(), [&pass](const Team& team) { pass.run(team); });
  }
}

}  // namespace int4moe
