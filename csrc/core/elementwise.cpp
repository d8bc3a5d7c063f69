#include "core/elementwise.h"

#include "core/threads.h"
#include "isa/avx2_elementwise.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

namespace {

// Work below this many elements is done by the calling thread: waking others takes longer.
constexpr int64_t kAlone = 1 << 15;

// fn(row) for every row, rows in equal parts to the threads.
template <class F>
void each_row(int64_t rows, int64_t columns, int threads, F&& fn) {
  if (rows * columns < kAlone || threads < 2) {
    for (int64_t r = 0; r < rows; ++r) fn(r);
    return;
  }
  parallel(threads, [&](const Team& team) {
    for (int64_t r = rows * team.id / team.size, end = rows * (team.id + 1) / team.size; r < end; ++r) fn(r);
  });
}

}  // namespace

void rms_norm(FloatType type, int64_t rows, int64_t columns, const void* x, const void* weight, float eps, void* y,
              int threads) {
  const int64_t bytes = columns * (type == FloatType::kFloat32 ? 4 : 2);
  each_row(rows, columns, threads, [&](int64_t r) {
    avx2::rms_norm_row(type, columns, static_cast<const char*>(x) + r * bytes, weight, eps, static_cast<char*>(y) + r * bytes);
  });
}

void rotate(const Rotary& r, int threads) {
  each_row(r.rows, int64_t(r.heads) * r.head_dim, threads, [&](int64_t row) { avx2::rotate_one(r, row); });
}

void rotate_pairs(const PairRotary& r, int threads) {
  each_row(r.rows, int64_t(r.heads) * r.turned, threads, [&](int64_t row) { avx2::rotate_pairs_one(r, row); });
}

void softmax_top_k(const TopK& t, int threads) {
  each_row(t.tokens, int64_t(t.experts) * t.top_k, threads, [&](int64_t token) { avx2::top_k_one(t, token); });
}

void sigmoid_top_k(const SigmoidTopK& t, int threads) {
  each_row(t.tokens, int64_t(t.experts) * t.top_k, threads, [&](int64_t token) { avx2::sigmoid_top_k_one(t, token); });
}

void gated_silu(FloatType type, int64_t rows, int64_t columns, const void* gate, const void* up, void* y, int threads) {
  const int64_t bytes = columns * (type == FloatType::kFloat32 ? 4 : 2);
  each_row(rows, columns, threads, [&](int64_t r) {
    avx2::gated_silu(type, columns, static_cast<const char*>(gate) + r * bytes, static_cast<const char*>(up) + r * bytes,
                     static_cast<char*>(y) + r * bytes);
  });
}

void add_scaled(FloatType type, int64_t rows, int64_t columns, const void* x, const void* shared, const void* score,
                void* y, int threads) {
  const int64_t size = type == FloatType::kFloat32 ? 4 : 2, bytes = columns * size;
  each_row(rows, columns, threads, [&](int64_t r) {
    avx2::add_scaled_row(type, columns, static_cast<const char*>(x) + r * bytes, static_cast<const char*>(shared) + r * bytes,
                         static_cast<const char*>(score) + r * size, static_cast<char*>(y) + r * bytes);
  });
}

#else

void rms_norm(FloatType, int64_t, int64_t, const void*, const void*, float, void*, int) {}
void rotate(const Rotary&, int) {}
void rotate_pairs(const PairRotary&, int) {}
void softmax_top_k(const TopK&, int) {}
void sigmoid_top_k(const SigmoidTopK&, int) {}
void gated_silu(FloatType, int64_t, int64_t, const void*, const void*, void*, int) {}
void add_scaled(FloatType, int64_t, int64_t, const void*, const void*, const void*, void*, int) {}

#endif

}  // namespace int4moe
