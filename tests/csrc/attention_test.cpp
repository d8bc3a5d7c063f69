// Attention of one token and of many, with vectors of both widths, against sums in double.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cases.h"
#include "core/attention.h"
#include "core/cpu_features.h"
#include "isa/float_bits.h"
#include "kernels_test.h"
#include "memory.h"

namespace tests {

using namespace int4moe;

namespace {

struct Case {
  int batch, heads, kv_heads, tokens, keys, head_dim, value_dim;
};

// Groups of 1 to 8 heads and more; ends of blocks (64) and runs (256) of keys; sizes that only the narrow kernel takes.
const Case kCases[] = {
    {1, 1, 1, 1, 1, 32, 32},     {2, 2, 1, 1, 63, 64, 32},    {1, 3, 1, 1, 64, 32, 64},    {1, 8, 2, 1, 65, 32, 96},
    {1, 5, 1, 1, 66, 96, 32},    {3, 6, 1, 1, 2, 32, 32},     {1, 14, 2, 1, 255, 32, 32},  {1, 16, 2, 1, 256, 32, 32},
    {2, 9, 1, 1, 257, 32, 32},   {1, 24, 2, 1, 600, 32, 64},  {1, 4, 2, 1, 70, 16, 48},    {1, 4, 2, 1, 70, 24, 16},
    {1, 16, 1, 1, 300, 96, 64},  {1, 8, 1, 1, 130, 576, 512}, {1, 2, 2, 70, 70, 192, 128}, {1, 16, 2, 1, 40, 80, 48},
    {1, 4, 4, 1, 1024, 32, 160}, {1, 4, 2, 3, 3, 32, 32},     {2, 8, 1, 70, 70, 32, 32},   {1, 2, 1, 130, 130, 8, 16},
};

std::vector<double> expected_rows(const Case& c, const std::vector<float>& q, const std::vector<float>& k,
                                  const std::vector<float>& v, double scale) {
  std::vector<double> out;
  const int group = c.heads / c.kv_heads;
  for (int b = 0; b < c.batch; ++b) {
    for (int t = 0; t < c.tokens; ++t) {
      for (int h = 0; h < c.heads; ++h) {
        const size_t row = (size_t(b) * c.heads + h) * c.tokens + t, first = (size_t(b) * c.kv_heads + h / group) * c.keys;
        const int seen = c.keys - c.tokens + t + 1;
        std::vector<double> p(static_cast<size_t>(seen)), sums(size_t(c.value_dim), 0.0);
        double most = -1e300, total = 0;
        for (int i = 0; i < seen; ++i) {
          for (int d = 0; d < c.head_dim; ++d) {
            p[size_t(i)] += scale * q[row * c.head_dim + d] * k[(first + i) * c.head_dim + d];
          }
          most = std::max(most, p[size_t(i)]);
        }
        for (double& x : p) total += x = std::exp(x - most);
        for (int i = 0; i < seen; ++i) {
          for (int d = 0; d < c.value_dim; ++d) sums[size_t(d)] += p[size_t(i)] / total * v[(first + i) * c.value_dim + d];
        }
        out.insert(out.end(), sums.begin(), sums.end());
      }
    }
  }
  return out;
}

// Random values of `type`; `values` gets them as floats.
std::vector<uint8_t> random_heads(FloatType type, size_t count, float scale, Random& random, std::vector<float>& values) {
  std::vector<uint8_t> bytes(count * (type == FloatType::kFloat32 ? 4 : 2));
  values.clear();
  for (size_t i = 0; i < count; ++i) {
    float x = scale * random.normal();
    if (type == FloatType::kFloat32) {
      std::memcpy(&bytes[4 * i], &x, 4);
    } else {
      const uint16_t h = float_to_bf16(x);
      std::memcpy(&bytes[2 * i], &h, 2);
      x = bf16_to_float(h);
    }
    values.push_back(x);
  }
  return bytes;
}

void test_case(const Case& c, FloatType type, bool avx512) {
  Random random(uint64_t(c.keys) * 31 + uint64_t(c.heads));
  std::vector<float> q, k, v;
  const auto count = [&](int heads, int tokens, int dim) { return size_t(c.batch) * heads * tokens * dim; };
  // Scores of a few units, so that weights differ and the maximum changes from block to block.
  const auto q_bytes = random_heads(type, count(c.heads, c.tokens, c.head_dim), 2, random, q);
  const auto k_bytes = random_heads(type, count(c.kv_heads, c.keys, c.head_dim), 1, random, k);
  const auto v_bytes = random_heads(type, count(c.kv_heads, c.keys, c.value_dim), 1, random, v);
  const float scale = 1.0f / std::sqrt(float(c.head_dim));
  const auto heads = [](const std::vector<uint8_t>& bytes, int n, int tokens, int64_t dim) {
    return Heads{bytes.data(), {n * tokens * dim, tokens * dim, dim}};
  };
  AttentionArgs a{type, c.batch, c.heads, c.kv_heads, c.tokens, c.keys, c.head_dim, c.value_dim,
                  heads(q_bytes, c.heads, c.tokens, c.head_dim), heads(k_bytes, c.kv_heads, c.keys, c.head_dim),
                  heads(v_bytes, c.kv_heads, c.keys, c.value_dim), nullptr, scale, avx512};
  const std::vector<double> want = expected_rows(c, q, k, v, scale);
  const size_t bytes = type == FloatType::kFloat32 ? 4 : 2;
  Buffer<uint8_t> first(want.size() * bytes);
  for (const int threads : {1, 2, 5}) {
    Buffer<uint8_t> found(want.size() * bytes + 64);
    a.out = found.data();
    attention(a, threads);
    check(found[want.size() * bytes] == 0xa5, "attention writes no more than its result (%d keys)", c.keys);
    if (threads > 1) {
      check(!std::memcmp(found.data(), first.data(), want.size() * bytes),
            "attention of %d x %d heads over %d keys, %s: bits on %d threads", c.batch, c.heads, c.keys,
            avx512 ? "AVX-512" : "AVX2", threads);
      continue;
    }
    std::memcpy(first.data(), found.data(), want.size() * bytes);
    double error = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      float x;
      uint16_t h;
      if (type == FloatType::kFloat32) {
        std::memcpy(&x, &found[4 * i], 4);
      } else {
        std::memcpy(&h, &found[2 * i], 2);
        x = bf16_to_float(h);
      }
      error += (x - want[i]) * (x - want[i]);
      norm += want[i] * want[i];
    }
    const double relative = std::sqrt(error / norm);
    check(relative < (type == FloatType::kFloat32 ? 2e-6 : 3e-3),
          "attention of %d x %d heads, %d tokens, %d keys, %s %s: error %.2g", c.batch, c.heads, c.tokens, c.keys,
          avx512 ? "AVX-512" : "AVX2", type == FloatType::kFloat32 ? "float32" : "bfloat16", relative);
  }
  Buffer<uint8_t> found(want.size() * bytes);
  a.out = found.data();
  test_without_memory("attention", [&] { attention(a, 3); },
                      [&] { return !std::memcmp(found.data(), first.data(), want.size() * bytes); });
}

}  // namespace

void test_attention(const Kernels& k) {
  // One of the rows of each width.
  const bool wide = !std::strcmp(k.isa, "avx512");
  if (!attention_available() || std::strcmp(k.compute, "w4a8") || (!wide && std::strcmp(k.isa, "avx2"))) return;
  for (const Case& c : kCases) {
    for (const FloatType type : {FloatType::kBFloat16, FloatType::kFloat32}) test_case(c, type, wide);
  }
}

}  // namespace tests
