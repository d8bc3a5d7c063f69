// The parts of the test program.
#pragma once

#include "isa/kernels.h"

namespace tests {

// One row of kernels, on matrices; `quick` tries fewer batch sizes.
void test_row(const int4moe::Kernels& k, bool quick);

// Two rows that are documented to agree to the bit.
void test_same_bits(const int4moe::Kernels& a, const int4moe::Kernels& b);

// load, store, accumulate and activate against the scalar row.
void test_elementwise(const int4moe::Kernels& k);

// A whole MoE layer and a linear through the driver, on one and on several threads, against float64.
void test_layer(const int4moe::Kernels& k);
void test_attention(const int4moe::Kernels& k);
// Dense linears, at the row's width of vectors.
void test_dense(const int4moe::Kernels& k);
void test_decode(const int4moe::Kernels& k);
void test_decode_latent(const int4moe::Kernels& k);
void test_latent(const int4moe::Kernels& k);

// Regions of the core's own threads.
void test_threads();

// Calls while allocations fail, those of no row.
void test_memory();

// That an AMX row leaves no tile configuration behind.
void test_tiles_released(const int4moe::Kernels& k);

}  // namespace tests
