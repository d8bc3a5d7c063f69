#include "core/dense.h"

#include "core/cpu_features.h"
#include "core/threads.h"
#include "core/workspace.h"
#include "isa/avx2_dense.h"
#include "isa/dense_kernels.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

namespace {

constexpr int64_t kAloneBytes = 1 << 18;  // of weights: a region takes as long as reading so many

}  // namespace

bool dense_available() { return cpu_features() & kAvx2; }

const DenseKernels& dense_kernels([[maybe_unused]] bool avx512) {
#ifdef INT4MOE_HAVE_AVX512
  if (avx512 && (cpu_features() & kAvx512)) return kAvx512Dense;
#endif
  return kAvx2Dense;
}

void dense_linear(const DenseWeight& w, int tokens, const uint16_t* x, uint16_t* y, bool avx512, int threads) {
  const DenseKernels& kernels = dense_kernels(avx512);
  const size_t row = dense_row_floats(w.columns);
  Workspace workspace;
  auto* prepared = reinterpret_cast<float*>(workspace.reserve(row * size_t(tokens) * sizeof(float)));
  for (int t = 0; t < tokens; ++t) kernels.prepare(w.columns, x + t * w.columns, w.compact, prepared + row * size_t(t));
  if (w.rows * w.columns * 2 < kAloneBytes) threads = 1;
  parallel(threads, [&](const Team& team) {
    kernels.rows(w, w.rows * team.id / team.size, w.rows * (team.id + 1) / team.size, tokens, prepared, y);
  });
}

void float_linear(int tokens, int64_t rows, int64_t columns, const uint16_t* x, const float* w, float* y, int threads) {
  if (rows * columns * 4 < kAloneBytes) threads = 1;
  parallel(threads, [&](const Team& team) {
    avx2::float_rows(tokens, rows * team.id / team.size, rows * (team.id + 1) / team.size, rows, columns, x, w, y);
  });
}

#else

bool dense_available() { return false; }
void dense_linear(const DenseWeight&, int, const uint16_t*, uint16_t*, bool, int) {}
void float_linear(int, int64_t, int64_t, const uint16_t*, const float*, float*, int) {}

#endif

}  // namespace int4moe
