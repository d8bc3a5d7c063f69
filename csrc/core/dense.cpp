#include "core/dense.h"

#include "core/cpu_features.h"
#include "core/threads.h"
#include "core/workspace.h"
#include "isa/avx2_dense.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

bool dense_available() { return cpu_features() & kAvx2; }

void dense_linear(int tokens, int64_t rows, int64_t columns, const uint16_t* x, const uint16_t* w, const uint16_t* bias,
                  uint16_t* y, int threads) {
  Workspace workspace;
  auto* wide = reinterpret_cast<float*>(workspace.reserve(size_t(tokens) * size_t(columns) * 4));
  avx2::widen(int64_t(tokens) * columns, x, wide);
  // A region takes as long as reading so many bytes.
  if (rows * columns * 2 < 1 << 18) threads = 1;
  parallel(threads, [&](const Team& team) {
    const int64_t first = rows * team.id / team.size, last = rows * (team.id + 1) / team.size;
    avx2::dense_rows(tokens, first, last, rows, columns, wide, w, bias, y);
  });
}

void float_linear(int tokens, int64_t rows, int64_t columns, const uint16_t* x, const float* w, float* y, int threads) {
  if (rows * columns * 4 < 1 << 18) threads = 1;
  parallel(threads, [&](const Team& team) {
    avx2::float_rows(tokens, rows * team.id / team.size, rows * (team.id + 1) / team.size, rows, columns, x, w, y);
  });
}

#else

bool dense_available() { return false; }
void dense_linear(int, int64_t, int64_t, const uint16_t*, const uint16_t*, const uint16_t*, uint16_t*, int) {}

void float_linear(int, int64_t, int64_t, const uint16_t*, const float*, float*, int) {}

#endif

}  // namespace int4moe
