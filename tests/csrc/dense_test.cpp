// Dense linears and bfloat16 weights in 12 bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cases.h"
#include "core/compact.h"
#include "core/cpu_features.h"
#include "core/dense.h"
#include "isa/float_bits.h"
#include "kernels_test.h"

namespace tests {

using namespace int4moe;

namespace {

using Words = std::vector<uint16_t>;

Words some_weights(int rows, int columns, Random& random) {
  Words words;
  for (int n = 0; n < rows; ++n) {
    const float scale = std::ldexp(1.0f, random.below(40) - 20);  // each row's own
    for (int k = 0; k < columns; ++k) words.push_back(float_to_bf16(scale * random.normal()));
  }
  return words;
}

// Codes of one row as the format says, by hand.
void test_literal_words() {
  Words row(160, 0);
  row[0] = 0x3f80;    // 1: exponent 127
  row[31] = 0xc0ff;   // -7.96875: exponent 129, mantissa 127
  row[30] = 0xc080;   // -4
  row[32] = 0x3a01;   // exponent 116, mantissa 1
  row[95] = 0xbf00;   // -0.5: exponent 126
  row[96] = 0xbf95;   // -1.1640625: exponent 127, mantissa 0x15
  row[97] = 0x8000;   // -0
  row[128] = 0x4000;  // 2: exponent 128
  row[5] = 0x3900;    // exponent 114, the sixteenth from 129 on: beside
  const auto c = Compact::pack(row.data(), 1, 160, 1);
  check(bool(c), "a row of few exponents fits in 12 bits");
  if (!c) return;
  const CompactWords& w = c->words();
  // 115 to 129 leave out one, 114 to 128 two.
  check(w.exponents[0] == 114, "exponents begin behind 114, not %d", w.exponents[0]);
  const int last = 0x800 | 13 << 7 | 0x15;  // of column 96
  check(w.words[0] == ((13 << 7) << 4 | last >> 8), "column 0 and the top of column 96");
  check(w.words[32] == (((2 << 7) + 1) << 4 | (last >> 4 & 15)), "column 32 and the middle of column 96");
  check(w.words[64] == (last & 15), "column 64 and the end of column 96");
  check(w.words[31] == (0x800 | 15 << 7 | 127) << 4, "column 31");
  check(w.words[64 + 31] == (0x800 | 12 << 7) << 4, "column 95");
  check(w.words[1] == 0x8, "the sign of column 97, and column 1");
  check(w.words[96] == (14 << 7) << 4, "column 128");
  check(w.words[5] == 0 && w.first[0] == 0 && w.first[1] == 1 && w.columns[0] == 5 && w.values[0] == 0x3900,
        "column 5 is beside the row");
}

void test_round_trips() {
  Random random(11);
  for (const int columns : {32, 96, 128, 160, 256, 2048}) {
    for (const int rows : {1, 3, 40}) {
      Words words = some_weights(rows, columns, random);
      for (size_t i = 0; i < words.size(); i += 997) {
        const uint16_t odd[] = {0, 0x8000, 0x0001, 0x8040, 0x7f7f, 0xff7f, 0x0080};
        words[i] = odd[random.below(7)];  // zeros, denormal numbers, the largest and the smallest
      }
      const auto c = Compact::pack(words.data(), rows, columns, 2);
      const bool small = rows * columns < 1024;  // more may lie beside than there are rows
      check(c || small, "%d x %d in 12 bits", rows, columns);
      if (!c) continue;
      Words back(words.size());
      c->unpack(back.data());
      check(back == words, "%d x %d as it was", rows, columns);
    }
  }
  for (const uint16_t special : {0x7f80, 0xff80, 0x7fc0}) {
    Words words = some_weights(4, 256, random);
    words[700] = special;
    check(!Compact::pack(words.data(), 4, 256, 2), "no 12 bits for a weight of %x", special);
  }
  Words spread = some_weights(8, 256, random);
  for (size_t i = 0; i < spread.size(); i += 30) spread[i] = uint16_t((i % 3 ? 20 : 230) << 7);
  check(!Compact::pack(spread.data(), 8, 256, 1), "no 12 bits for weights far apart");
  const Words wide(32 * 1025, 0x3f80);
  check(!Compact::pack(wide.data(), 1, 32 * 1025, 1), "no 12 bits for rows that a block cannot hold");
}

struct Product {
  int tokens, rows, columns;
  bool bias;
};

Words run(const DenseWeight& w, const Words& x, int tokens, bool avx512, int threads = 1) {
  Words y(size_t(tokens) * size_t(w.rows));
  dense_linear(w, tokens, x.data(), y.data(), avx512, threads);
  return y;
}

void test_product(const Product& p, bool avx512, Random& random) {
  const Words words = some_weights(p.rows, p.columns, random);
  Words x, bias;
  for (int t = 0; t < p.tokens; ++t) {
    const float scale = std::ldexp(1.0f, random.below(20) - 10);
    for (int k = 0; k < p.columns; ++k) x.push_back(float_to_bf16(scale * random.normal()));
  }
  for (int n = 0; n < p.rows; ++n) bias.push_back(float_to_bf16(random.normal()));
  const auto compact = Compact::pack(words.data(), p.rows, p.columns, 1);
  DenseWeight w{words.data(), nullptr, p.bias ? bias.data() : nullptr, p.rows, p.columns};
  const std::string name = "dense " + std::to_string(p.tokens) + " tokens, " + std::to_string(p.rows) + " x " +
                           std::to_string(p.columns) + (avx512 ? ", AVX-512" : ", AVX2");
  for (const bool packed : {false, true}) {
    if (packed && !compact) continue;
    w.compact = packed ? &compact->words() : nullptr;
    const Words y = run(w, x, p.tokens, avx512);
    for (int t = 0; t < p.tokens; ++t) {
      for (int n = 0; n < p.rows; ++n) {
        double sum = p.bias ? bf16_to_float(bias[size_t(n)]) : 0, size = std::fabs(sum);
        for (int k = 0; k < p.columns; ++k) {
          const double term = double(bf16_to_float(words[size_t(n) * p.columns + k])) * bf16_to_float(x[size_t(t) * p.columns + k]);
          sum += term;
          size += std::fabs(term);
        }
        const double got = bf16_to_float(y[size_t(t) * p.rows + n]);
        check(std::fabs(got - sum) <= std::fabs(sum) / 200 + size * 1e-6, "%s%s: [%d, %d] is %g, not %g", name.c_str(),
              packed ? ", 12 bits" : "", t, n, got, sum);
      }
    }
    check(y == run(w, x, p.tokens, !avx512), "%s: the same bits at both widths", name.c_str());
    check(y == run(w, x, p.tokens, avx512, 3), "%s: the same bits on three threads", name.c_str());
    Words one;
    for (int t = 0; t < p.tokens; ++t) {
      const Words row = run(w, Words(x.begin() + t * p.columns, x.begin() + (t + 1) * p.columns), 1, avx512);
      one.insert(one.end(), row.begin(), row.end());
    }
    check(y == one, "%s: a token's bits do not depend on the others", name.c_str());
    if (!packed || compact->words().first[p.rows]) continue;
    w.compact = nullptr;
    check(y == run(w, x, p.tokens, avx512), "%s: in 12 bits the same bits", name.c_str());
  }
}

// What lies beside a row counts, and activations may be of any size.
void test_odd_values(bool avx512) {
  Random random(3);
  constexpr int kColumns = 256;
  constexpr double kSmallest = 1e-40;  // of bfloat16, denormal
  Words words = some_weights(16, kColumns, random);
  words[1 * kColumns + 37] = 0x4d00;  // far above its row
  words[2 * kColumns + 200] = 0x0001;
  const auto compact = Compact::pack(words.data(), 16, kColumns, 1);
  check(compact && compact->words().first[16] >= 2, "two weights beside");
  if (!compact) return;
  const DenseWeight w{words.data(), &compact->words(), nullptr, 16, kColumns};
  for (const float scale : {1.0f, 1e-37f, 1e-30f, 1e30f, 0.0f}) {
    for (const int tokens : {1, 7}) {
      Words x;
      for (int i = 0; i < tokens * kColumns; ++i) x.push_back(float_to_bf16(scale * random.normal()));
      const Words y = run(w, x, tokens, avx512);
      for (int t = 0; t < tokens; ++t) {
        for (int n = 0; n < 16; ++n) {
          double sum = 0, size = 0;
          for (int k = 0; k < kColumns; ++k) {
            const double term = double(bf16_to_float(words[size_t(n) * kColumns + k])) * bf16_to_float(x[size_t(t) * kColumns + k]);
            sum += term;
            size += std::fabs(term);
          }
          const double got = bf16_to_float(y[size_t(t) * 16 + n]);
          const bool same = std::fabs(sum) > 3.3e38 ? std::isinf(got) || std::fabs(got) > 3.2e38
                                                    : std::fabs(got - sum) <= std::fabs(sum) / 200 + size * 2e-6 + kSmallest;
          check(same, "12 bits, activations about %g, %d tokens: [%d, %d] is %g, not %g", scale, tokens, t, n, got, sum);
        }
      }
    }
  }
  for (const uint16_t special : {0x7f80, 0x7fc0}) {
    Words x(2 * kColumns, 0x3f80);
    x[kColumns + 5] = special;
    const Words y = run(w, x, 2, avx512);
    for (int n = 0; n < 16; ++n) {
      check(std::isfinite(bf16_to_float(y[size_t(n)])) && !std::isfinite(bf16_to_float(y[16 + size_t(n)])),
            "an activation of %x spoils its own token alone", special);
    }
  }
}

}  // namespace

void test_dense(const Kernels& k) {
  // One of the rows of each width.
  const bool avx512 = !std::strcmp(k.isa, "avx512");
  if (!dense_available() || std::strcmp(k.compute, "w4a8") || (!avx512 && std::strcmp(k.isa, "avx2"))) return;
  test_literal_words();
  test_round_trips();
  Random random(7);
  for (const int tokens : {1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 32}) {
    test_product({tokens, 37, 96, tokens % 2 == 0}, avx512, random);
    test_product({tokens, 19, 320, tokens % 3 == 0}, avx512, random);
  }
  test_product({1, 5, 2048, true}, avx512, random);
  test_product({9, 50, 2048, false}, avx512, random);
  test_product({6, 7, 10912, false}, avx512, random);  // three rows fill a block but for 32 words
  test_odd_values(avx512);
}

}  // namespace tests
