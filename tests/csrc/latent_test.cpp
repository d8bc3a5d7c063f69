// What latent attention (DeepSeek) needs beside the kernels of others: pairs that are turned, each head's own products, and
// softmax routers with groups.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cases.h"
#include "core/dense.h"
#include "core/elementwise.h"
#include "core/head_linear.h"
#include "isa/float_bits.h"
#include "kernels_test.h"

namespace tests {

using namespace int4moe;

namespace {

using Words = std::vector<uint16_t>;

Words random_words(size_t count, Random& random) {
  Words words;
  for (size_t i = 0; i < count; ++i) words.push_back(float_to_bf16(random.normal()));
  return words;
}

// Rows of 2 heads with 3 more elements each, of which `turned` from the first on; tables of floats as a complex number has
// them, or of bfloat16 one by one.
void test_pairs(int turned, bool apart, bool complex) {
  constexpr int kRows = 5, kHeads = 2, kCosRows = 2;
  Random random{uint64_t(turned)};
  const int64_t width = turned + 3;
  Words x = random_words(size_t(kRows * kHeads * width), random);
  const Words before = x, cos = random_words(size_t(kCosRows * turned), random), sin = random_words(cos.size(), random);
  std::vector<float> numbers;
  for (int i = 0; i < kCosRows * turned; ++i) numbers.push_back(random.normal());
  PairRotary r{FloatType::kBFloat16, kRows, kHeads, turned, x.data(), {kHeads * width, width}, FloatType::kBFloat16,
               cos.data(), sin.data(), kCosRows, 1, apart};
  if (complex) {
    r.table_type = FloatType::kFloat32;
    r.cos = numbers.data();
    r.sin = numbers.data() + 1;
    r.step = 2;
  }
  rotate_pairs(r, 2);
  for (int at = 0; at < kRows * kHeads; ++at) {
    const int row = at / kHeads;
    for (int i = 0; i < turned / 2; ++i) {
      const int64_t first = at * width, table = row % kCosRows * turned;
      const double a = bf16_to_float(before[size_t(first + 2 * i)]), b = bf16_to_float(before[size_t(first + 2 * i + 1)]);
      const double c = complex ? numbers[size_t(table + 2 * i)] : bf16_to_float(cos[size_t(table + i)]);
      const double s = complex ? numbers[size_t(table + 2 * i + 1)] : bf16_to_float(sin[size_t(table + i)]);
      const double want[2] = {a * c - b * s, b * c + a * s};
      for (int j = 0; j < 2; ++j) {
        const double found = bf16_to_float(x[size_t(first + (apart ? i + j * turned / 2 : 2 * i + j))]);
        check(std::abs(found - want[j]) <= std::abs(want[j]) / 250 + 1e-6, "pair %d of %d: %g, not %g", i, turned, found, want[j]);
      }
    }
    for (int64_t i = turned; i < width; ++i) {
      check(x[size_t(at * width + i)] == before[size_t(at * width + i)], "what is not turned stays");
    }
  }
}

// Each head has the bits of a dense linear of its own, on any number of threads.
void test_heads(int tokens, int heads, int rows, int columns, bool avx512) {
  Random random{uint64_t(rows)};
  const int64_t x_width = columns + 16, y_width = rows + 5;
  const Words x = random_words(size_t(tokens * heads * x_width), random), w = random_words(size_t(heads) * rows * columns, random);
  for (const int threads : {1, 2, 5}) {
    const uint16_t untouched = 0x1234;
    Words y(size_t(tokens * heads * y_width), untouched);
    head_linear({tokens, heads, rows, columns, x.data(), {heads * x_width, x_width}, w.data(), y.data(), {heads * y_width, y_width}, avx512}, threads);
    for (int t = 0; t < tokens; ++t) {
      for (int h = 0; h < heads; ++h) {
        Words alone(static_cast<size_t>(rows));
        dense_linear({w.data() + int64_t(h) * rows * columns, nullptr, nullptr, rows, columns}, 1, x.data() + (t * heads + h) * x_width,
                     alone.data(), false, 1);
        const auto found = y.begin() + (t * heads + h) * y_width;
        check(std::equal(alone.begin(), alone.end(), found), "head %d of %d tokens on %d threads has the bits of a linear", h, tokens, threads);
        check(std::all_of(found + rows, found + y_width, [&](uint16_t v) { return v == untouched; }), "no more is written");
      }
    }
  }
}

void test_groups() {
  // Four groups of two: the greatest are in the third, the first and the last.
  const float logits[8] = {2, 0, 1, 1.5f, -1, 3, 1.9f, 1.8f};
  float scores[3];
  int64_t ids[3];
  TopK top{FloatType::kFloat32, 1, 8, 3, logits, false, FloatType::kFloat32, scores, ids, 4, 2, 2.0f};
  softmax_top_k(top, 1);
  double sum = 0;
  for (const float x : logits) sum += std::exp(double(x));
  const int64_t want[3] = {5, 0, 1};
  for (int i = 0; i < 3; ++i) {
    check(ids[i] == want[i], "choice %d within two groups is %d, not %d", i, int(ids[i]), int(want[i]));
    check(std::abs(scores[i] - 2 * std::exp(double(logits[want[i]])) / sum) < 1e-6, "its score is of all experts");
  }
}

}  // namespace

void test_latent(const Kernels& k) {
  if (!dense_available() || std::string(k.isa) != "avx2" || std::string(k.compute) != "w4a8") return;
  for (const int turned : {2, 16, 64, kMostTurned}) {
    for (const bool apart : {false, true}) {
      for (const bool complex : {false, true}) test_pairs(turned, apart, complex);
    }
  }
  for (const bool avx512 : {false, true}) {  // where this CPU has it
    test_heads(1, 1, 16, 32, avx512);
    test_heads(3, 5, 40, 64, avx512);
    test_heads(kDenseTokens, 4, 33, 32, avx512);
    test_heads(2 * kDenseTokens + 3, 2, 64, 96, avx512);
  }
  test_groups();
}

}  // namespace tests
