#include "core/decode_products.h"

#include <algorithm>

#include "core/shares.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

namespace {

constexpr int kMostBlocks = 64;  // of 16 rows, that a thread takes at once, for up to
constexpr int kItemRows = 8;     // sequences; fewer for more

Matrix matrix(const DecodeLinear& p) { return p.layout->matrix(p.blob, 0, kUp); }

// Whether b reads what `prepare` wrote for a.
bool same_input(const DecodeLinear& a, const DecodeLinear& b) {
  if (!a.layout || !b.layout) return !a.layout && !b.layout && !a.dense.compact == !b.dense.compact;
  return a.kernels == b.kernels && matrix(a).group_size == matrix(b).group_size && !a.layout->perm(a.blob, 0, kUp) &&
         !b.layout->perm(b.blob, 0, kUp);
}

template <class F>
void each_row(const DecodeProducts::Mine& m, int rows, F&& f) {
  for (int r = m.first_row; r < rows; r += m.row_step) f(r);
}

}  // namespace

DecodeProducts::DecodeProducts(int rows, int threads, bool avx512)
    : rows_(rows), threads_(threads), dense_(dense_kernels(avx512)) {}

void DecodeProducts::expect(const DecodeLinear& p) {
  if (!p.rows) return;
  columns_ = std::max(columns_, p.columns);
  const size_t bytes = p.layout ? p.kernels->row_bytes(matrix(p)) : dense_row_floats(p.columns) * sizeof(float);
  prepared_bytes_ = std::max(prepared_bytes_, bytes * size_t(rows_));
}

DecodeProducts::Prepared DecodeProducts::carve_prepared(Carver& c) const {
  Prepared prepared;
  for (uint8_t*& p : prepared.of) p = c.take<uint8_t>(prepared_bytes_);
  return prepared;
}

void DecodeProducts::carve(Carver& c, Mine& m) const {
  m.stage = c.take<float>(size_t(columns_) + 16);
  m.out = c.take<float>(size_t(rows_) * kMostBlocks * kBlockRows);
}

void DecodeProducts::prepare(const Mine& m, const DecodeLinear& p, const uint16_t* x, uint8_t* prepared) const {
  if (!p.layout) {
    auto* to = reinterpret_cast<float*>(prepared);
    const size_t stride = dense_row_floats(p.columns);
    each_row(m, rows_, [&](int r) {
      dense_.prepare(p.columns, x + size_t(r) * p.columns, p.dense.compact, to + stride * size_t(r));
    });
    return;
  }
  const Matrix w = matrix(p);
  const size_t bytes = p.kernels->row_bytes(w);
  const int32_t* perm = p.layout->perm(p.blob, 0, kUp);
  each_row(m, rows_, [&](int r) {
    p.kernels->load(FloatType::kBFloat16, x + size_t(r) * p.columns, perm, m.stage, size_t(p.columns));
    p.kernels->prepare(w, m.stage, prepared + bytes * size_t(r));
  });
}

void DecodeProducts::multiply(const Team& team, const Mine& m, const uint16_t* x, const DecodeGroup& g, std::atomic<int>& next) const {
  const uint8_t* prepared[kProductsTogether] = {};
  int ends[kProductsTogether];
  for (int i = 0, end = 0; i < g.count; ++i) {
    for (int j = 0; j < i && !prepared[i]; ++j) {
      if (same_input(*g.linear[j], *g.linear[i])) prepared[i] = prepared[j];
    }
    if (!prepared[i]) {
      prepare(m, *g.linear[i], x, m.prepared->of[i]);
      prepared[i] = m.prepared->of[i];
    }
    ends[i] = end += ceil_div(g.linear[i]->rows, kBlockRows);
  }
  if (m.row_step > 1) team.barrier();
  const auto part = [&](const Share& share) {
    int i = 0;
    while (share.first >= ends[i]) ++i;
    return i;
  };
  const auto codes = [&](const Share& share) -> const uint8_t* {
    if (!share.count) return nullptr;
    const int i = part(share);
    return g.linear[i]->layout ? matrix(*g.linear[i]).block_codes(share.first - (i ? ends[i - 1] : 0)) : nullptr;
  };
  const int most = kMostBlocks * kItemRows / std::max(kItemRows, rows_);
  const auto take = [&] { return take_share(next, ends, g.count, threads_, most); };
  for (Share now = take(); now.count;) {
    const Share after = take();
    const int i = part(now);
    item(m, *g.linear[i], now.first - (i ? ends[i - 1] : 0), now.count, prepared[i], g.out[i], codes(after));
    now = after;
  }
}

void DecodeProducts::item(const Mine& m, const DecodeLinear& p, int first, int blocks, const uint8_t* prepared, uint16_t* y, const uint8_t* next) const {
  const int column = first * kBlockRows, width = blocks * kBlockRows, valid = std::min(width, p.rows - column);
  if (!p.layout) {
    dense_.rows(p.dense, column, column + valid, rows_, reinterpret_cast<const float*>(prepared), y);
    return;
  }
  const Matrix w = matrix(p);
  const Rows rows{prepared, p.kernels->row_bytes(w), nullptr, rows_};
  p.kernels->multiply(w, first, blocks, rows, m.out, size_t(width), next);
  const float* bias = p.layout->bias(p.blob, 0, kUp);
  for (int r = 0; r < rows_; ++r) {
    float* out = m.out + size_t(r) * width;
    if (bias) {
      for (int j = 0; j < valid; ++j) out[j] += bias[column + j];
    }
    p.kernels->store(FloatType::kBFloat16, out, y + size_t(r) * p.rows + column, size_t(valid));
  }
}

static_assert(kDecodeRows <= kDenseTokens, "the modules take as many by themselves, with the same bits");

#endif

}  // namespace int4moe
