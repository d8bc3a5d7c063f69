// The kernels of dense linears (core/dense.h), for each width of vectors. All of them give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/dense.h"

namespace int4moe {

// A row of activations as the kernels read it: a head, whose first float undoes the row's scaling, and the values in an order
// of each kernel's own, with zeros up to a multiple of 128.
constexpr int kDenseHead = 16;
static inline size_t dense_row_floats(int64_t columns) { return size_t(kDenseHead + (columns + 127) / 128 * 128); }

struct DenseKernels {
  // Of the row x [columns], for a weight that is compact or not; `row` is aligned to 64 bytes.
  void (*prepare)(int64_t columns, const uint16_t* x, bool compact, float* row);
  // y[t * w.rows + n] for n in [first, last), t < tokens; x: the prepared rows, one behind the other.
  void (*rows)(const DenseWeight& w, int64_t first, int64_t last, int tokens, const float* x, uint16_t* y);
};

extern const DenseKernels kAvx2Dense, kAvx512Dense;

// The widest that this CPU has, at most AVX2 unless `avx512` (core/dense.cpp).
const DenseKernels& dense_kernels(bool avx512);

}  // namespace int4moe
