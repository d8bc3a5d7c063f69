// What one row of the native backend provides: a table of function pointers for one instruction set and one compute
// mode. The driver (core/experts.cpp, core/linear.cpp) knows no instruction set; a row knows no routing and no threads.
//
// Rules for a row
// - Everything in its source file lives in a namespace of its own, or is static: a function template or inline function
//   shared with another file would be merged by the linker with whichever flags it was compiled first. For the same
//   reason it uses nothing of the C++ library.
// - w4a16: the result of one (row, token) must not depend on `rows.count`, on the token's place in a tile, nor on how
//   the driver cuts blocks: one fixed order of arithmetic per (row, token), the same bits from every code path.
// - Functions do not allocate and do not throw.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/layout.h"

namespace int4moe {

// Activation rows that a row's own `prepare` has written. Row i is at data + stride * (index ? index[i] : i).
struct Rows {
  const uint8_t* data = nullptr;
  size_t stride = 0;
  const int32_t* index = nullptr;
  int count = 0;

  const uint8_t* at(int i) const { return data + stride * size_t(index ? index[i] : i); }
};

// Tokens of one call of `multiply`, at most.
constexpr int kMostTokens = 96;

struct Kernels {
  const char* isa;      // avx2, avx512, ...
  const char* compute;  // w4a16 or w4a8
  uint32_t features;    // CPU features (core/cpu_features.h) that the row needs, all of them
  int tile;             // tokens per register tile: the driver cuts tokens into multiples of it

  // Bytes between prepared rows: a multiple of 64, better not a multiple of 4096. Only columns, group_size and
  // heavy_tails of the matrix matter here and in `prepare`.
  size_t (*row_bytes)(const Matrix& m);

  // Translates one row of activations into what `multiply` reads: x float32 [columns] in the matrix's column order.
  // Columns beyond m.columns up to m.lines * 8 count as 0.
  void (*prepare)(const Matrix& m, const float* x, uint8_t* row);

  // out[i * out_stride + (block - first) * 16 + r] = sum over k of W[block * 16 + r, k] * x_i[k], for i < rows.count (at
  // most kMostTokens) and first <= block < first + blocks. out is float32 and 64-byte aligned with out_stride a multiple of
  // 16; no bias. Rows of padding give 0. `next` is where this thread will read codes afterwards (or null), for prefetching.
  void (*multiply)(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                   const uint8_t* next);

  // h[i] = f(gate[i]) * up[i] (f(up[i]) where gate is null), count a multiple of 16, all 64-byte aligned; see
  // moe/activations.py. Elementwise: equal inputs give equal bits whatever their place.
  void (*activate)(ActivationKind kind, float alpha, float limit, const float* gate, const float* up, float* h,
                   size_t count);

  // dst[j] = x[perm ? perm[j] : j] as float32, j < count.
  void (*load)(FloatType type, const void* x, const int32_t* perm, float* dst, size_t count);

  // dst[j] = x[j] rounded to nearest even, j < count.
  void (*store)(FloatType type, const float* x, void* dst, size_t count);

  // y[j] += weight * (x[j] + (bias ? bias[j] : 0)), j < count.
  void (*accumulate)(float weight, const float* x, const float* bias, float* y, size_t count);

  // A bit 1 << FloatType for each type of the layer's activations that the row is meant for. A row that rounds
  // activations to 16 bits is for those alone.
  uint32_t types = 7;
};

constexpr uint32_t type_bit(FloatType t) { return 1u << int(t); }

// The first row for `isa`, `compute` and activations of `type` that needs no CPU feature beyond `features`, or null.
const Kernels* find_kernels(const char* isa, const char* compute, FloatType type, uint32_t features);

// Rows of this build, narrow to wide, of one (isa, compute) in the order of preference; ends with a null.
const Kernels* const* all_kernels();

}  // namespace int4moe
