// The matrix products of a decoding step (core/decode.h): threads take shares of them from one counter.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/decode.h"
#include "core/threads.h"
#include "core/workspace.h"
#include "isa/dense_kernels.h"

namespace int4moe {

constexpr int kProductsTogether = 3;

// Outputs of up to three linears over one input, each dense [rows][its rows].
struct DecodeGroup {
  const DecodeLinear* linear[kProductsTogether];
  uint16_t* out[kProductsTogether];
  int count;
};

class DecodeProducts {
 public:
  // Inputs as the kernels read them: a thread's own, or those of all, to which each thread brings its rows.
  struct Prepared {
    uint8_t* of[kProductsTogether];
  };

  // A thread's own.
  struct Mine {
    float *stage, *out;
    const Prepared* prepared;
    int first_row, row_step;  // of the rows that it prepares
  };

  DecodeProducts(int rows, int threads, bool avx512);

  // The linears that will come, before anything is carved; one without rows counts for nothing.
  void expect(const DecodeLinear& p);
  Prepared carve_prepared(Carver& c) const;
  void carve(Carver& c, Mine& m) const;

  // Takes shares of the group's outputs until none is left of `next`. x is dense [rows, columns].
  void multiply(const Team& team, const Mine& m, const uint16_t* x, const DecodeGroup& g, std::atomic<int>& next) const;

 private:
  void prepare(const Mine& m, const DecodeLinear& p, const uint16_t* x, uint8_t* prepared) const;
  void item(const Mine& m, const DecodeLinear& p, int first, int blocks, const uint8_t* prepared, uint16_t* y,
            const uint8_t* next) const;

  int rows_, threads_, columns_ = 0;
  const DenseKernels& dense_;
  size_t prepared_bytes_ = 0;
};

}  // namespace int4moe
