#include "core/decode_latent.h"

#include <algorithm>
#include <cstring>

#include "core/elementwise.h"
#include "core/head_linear.h"
#include "isa/avx2_elementwise.h"
#include "isa/dense_kernels.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

namespace {

constexpr int kParts = 4;  // of a head's product, which threads take one by one

template <class F>
void each_part(int heads, int64_t rows, std::atomic<int>& next, F&& f) {
  for (int task; (task = next.fetch_add(1, std::memory_order_relaxed)) < heads * kParts;) {
    const int64_t part = task % kParts;
    f(task / kParts, rows * part / kParts, rows * (part + 1) / kParts);
  }
}

}  // namespace

void DecodeLatent::expect(const DecodeLayer& l) { query_rank_ = std::max(query_rank_, l.latent.query.rows); }

void DecodeLatent::carve(Carver& c) {
  const auto rows = size_t(a_.rows);
  short_query_ = c.take<uint16_t>(rows * size_t(query_rank_));
  query_ = c.take<uint16_t>(rows * size_t(s_.heads) * size_t(width()));
  compressed_ = c.take<uint16_t>(rows * size_t(s_.head_dim));
}

DecodeLatent::Inputs DecodeLatent::carve_inputs(Carver& c) const {
  return {c.take<uint16_t>(size_t(a_.rows) * size_t(query_rank_))};
}

void DecodeLatent::carve(Carver& c, Mine& m) const {
  m.scratch = c.take<float>(size_t(a_.rows) * dense_row_floats(std::max(s_.latent.nope, s_.latent.rank)));
}

void DecodeLatent::turn(uint16_t* x, int row) const {
  const int64_t at = int64_t(row % a_.cos_rows) * s_.turned * (s_.latent.tables == FloatType::kFloat32 ? 4 : 2);
  avx2::rotate_pairs_one({FloatType::kBFloat16, 1, 1, s_.turned, x, {0, 0}, s_.latent.tables, static_cast<const char*>(a_.cos) + at,
                          static_cast<const char*>(a_.sin) + at, 1, 1, s_.latent.apart}, 0);
}

void DecodeLatent::extend(const DecodeLayer& l, int row, const DecodeCache& cache) const {
  uint16_t *from = compressed_ + int64_t(row) * s_.head_dim, *turned = from + s_.latent.rank;
  const int64_t length = a_.lengths[row];
  avx2::rms_norm_row(FloatType::kBFloat16, s_.latent.rank, from, l.k_norm, l.head_eps, cache.keys + length * cache.key_stride[1]);
  turn(turned, row);
  std::memcpy(cache.values + length * cache.value_stride[1], turned, size_t(s_.turned) * sizeof(uint16_t));
}

void DecodeLatent::before(const Team& team, const DecodeProducts::Mine& products, const Mine& m, const DecodeLayer& l,
                          const uint16_t* normed, const DecodeCache* caches, std::atomic<int>* next, uint16_t* queries) {
  const bool twice = l.latent.query.rows;
  const DecodeGroup group{{twice ? &l.latent.query : &l.q, &l.k}, {twice ? short_query_ : query_, compressed_}, 2};
  products_.multiply(team, products, normed, group, next[kProducts]);
  team.barrier();
  if (twice) {
    for (int r = products.first_row; r < a_.rows; r += products.row_step) {
      const int64_t at = int64_t(r) * l.latent.query.rows;
      avx2::rms_norm_row(FloatType::kBFloat16, l.latent.query.rows, short_query_ + at, l.q_norm, l.head_eps, m.in->query + at);
    }
    products_.multiply(team, products, m.in->query, {{&l.q}, {query_}, 1}, next[kQueries]);
  }
  for (int r = team.id; r < a_.rows; r += team.size) extend(l, r, caches[r]);
  if (twice) team.barrier();
  const int64_t narrow = width(), wide = s_.head_dim;
  const HeadLinear a{a_.rows, s_.heads, s_.latent.rank, s_.latent.nope, query_, {s_.heads * narrow, narrow}, l.latent.w_key,
                     queries, {s_.heads * wide, wide}, s_.avx512};
  each_part(s_.heads, a.rows, next[kHeads], [&](int head, int64_t first, int64_t last) {
    head_linear_one(a, head, first, last, m.scratch);
    for (int r = 0; !first && r < a_.rows; ++r) {
      uint16_t* turned = query_ + (int64_t(r) * s_.heads + head) * narrow + s_.latent.nope;
      turn(turned, r);
      std::memcpy(queries + (int64_t(r) * s_.heads + head) * wide + s_.latent.rank, turned, size_t(s_.turned) * sizeof(uint16_t));
    }
  });
  team.barrier();
}

void DecodeLatent::after(const Mine& m, const DecodeLayer& l, const uint16_t* attended, std::atomic<int>* next, uint16_t* mixed) const {
  const int64_t rank = s_.latent.rank, value = s_.latent.value_dim;
  const HeadLinear a{a_.rows, s_.heads, value, rank, attended, {s_.heads * rank, rank}, l.latent.w_value, mixed,
                     {s_.heads * value, value}, s_.avx512};
  each_part(s_.heads, a.rows, next[kValues],
            [&](int head, int64_t first, int64_t last) { head_linear_one(a, head, first, last, m.scratch); });
}

#endif

}  // namespace int4moe
