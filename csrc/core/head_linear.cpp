#include "core/head_linear.h"

#include <algorithm>

#include "core/threads.h"
#include "core/workspace.h"
#include "isa/dense_kernels.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

void head_linear(const HeadLinear& a, int threads) {
  if (a.tokens * a.heads * a.rows * a.columns < 1 << 18) threads = 1;
  Workspace workspace;
  const size_t own = head_linear_floats(a);
  auto* scratch = reinterpret_cast<float*>(workspace.reserve(own * size_t(threads) * sizeof(float)));
  const int64_t all = a.heads * a.rows;
  parallel(threads, [&](const Team& team) {
    const int64_t end = all * (team.id + 1) / team.size;
    for (int64_t at = all * team.id / team.size, next; at < end; at = next) {
      const int64_t head = at / a.rows;
      next = std::min(end, (head + 1) * a.rows);
      head_linear_one(a, int(head), at - head * a.rows, next - head * a.rows, scratch + own * size_t(team.id));
    }
  });
}

size_t head_linear_floats(const HeadLinear& a) {
  return size_t(std::min<int64_t>(a.tokens, kDenseTokens)) * dense_row_floats(a.columns);
}

void head_linear_one(const HeadLinear& a, int head, int64_t first, int64_t last, float* scratch) {
  const DenseKernels& kernels = dense_kernels(a.avx512);
  const size_t row = dense_row_floats(a.columns);
  // Tokens of a dense product lie as many elements apart as it has rows.
  const DenseWeight w{a.w + head * a.rows * a.columns, nullptr, nullptr, a.y_stride[0], a.columns};
  for (int64_t from = 0; from < a.tokens; from += kDenseTokens) {
    const int count = int(std::min<int64_t>(kDenseTokens, a.tokens - from));
    for (int t = 0; t < count; ++t) {
      kernels.prepare(a.columns, a.x + (from + t) * a.x_stride[0] + head * a.x_stride[1], false, scratch + row * size_t(t));
    }
    kernels.rows(w, first, last, count, scratch, a.y + from * a.y_stride[0] + head * a.y_stride[1]);
  }
}

#else

void head_linear(const HeadLinear&, int) {}
size_t head_linear_floats(const HeadLinear&) { return 0; }
void head_linear_one(const HeadLinear&, int, int64_t, int64_t, float*) {}

#endif

}  // namespace int4moe
