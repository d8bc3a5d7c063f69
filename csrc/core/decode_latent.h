// Latent attention in a decoding step (core/decode.h): what is before the attention over latents and after it.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/decode.h"
#include "core/decode_products.h"
#include "core/threads.h"
#include "core/workspace.h"

namespace int4moe {

class DecodeLatent {
 public:
  // What linears read: a thread's own, or that of all.
  struct Inputs {
    uint16_t* query;  // after its norm
  };

  // A thread's own.
  struct Mine {
    float* scratch;
    const Inputs* in;
  };

  enum Phase { kProducts, kQueries, kHeads, kValues, kPhases };

  DecodeLatent(const DecodeShape& shape, const DecodeArgs& args, const DecodeProducts& products)
      : s_(shape), a_(args), products_(products) {}

  // The layers that will come, before anything is carved.
  void expect(const DecodeLayer& l);
  void carve(Carver& c);
  Inputs carve_inputs(Carver& c) const;
  void carve(Carver& c, Mine& m) const;

  // Queries in the space of the latents [rows, heads, head_dim], complete for all behind the barrier at the end, and one more
  // token in the caches [rows]. `next` has a counter for each phase.
  void before(const Team& team, const DecodeProducts::Mine& products, const Mine& m, const DecodeLayer& l,
              const uint16_t* normed, const DecodeCache* caches, std::atomic<int>* next, uint16_t* queries);

  // What the heads attended to [rows, heads, rank], with each head's own product [rows, heads, value_dim].
  void after(const Mine& m, const DecodeLayer& l, const uint16_t* attended, std::atomic<int>* next, uint16_t* mixed) const;

 private:
  int width() const { return s_.latent.nope + s_.turned; }  // of a head's query
  void extend(const DecodeLayer& l, int row, const DecodeCache& cache) const;
  void turn(uint16_t* x, int row) const;

  const DecodeShape& s_;
  const DecodeArgs& a_;
  const DecodeProducts& products_;
  int query_rank_ = 0;
  uint16_t *short_query_ = nullptr, *query_ = nullptr, *compressed_ = nullptr;
};

}  // namespace int4moe
