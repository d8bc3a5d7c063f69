// What the tests of decoding steps share: random weights, and products and sums of bfloat16 rows.
#pragma once

#include <cstdint>
#include <vector>

#include "cases.h"
#include "core/decode.h"
#include "core/dense.h"
#include "core/linear.h"
#include "core/pack.h"
#include "isa/float_bits.h"

namespace tests {

using namespace int4moe;

constexpr FloatType kType = FloatType::kBFloat16;
using Words = std::vector<uint16_t>;

inline Words random_words(size_t count, Random& random, float scale, float offset = 0) {
  Words words;
  for (size_t i = 0; i < count; ++i) words.push_back(float_to_bf16(offset + scale * random.normal()));
  return words;
}

inline Dims dims(int rows, int columns, int group, bool more) {
  Dims d;
  d.rows = rows;
  d.columns = columns;
  d.group_size = group;
  d.scale_type = ScaleType::kBFloat16;
  d.zeros = d.bias = d.perm = more;
  return d;
}

// Random int4 weights of every projection of a layout.
struct Packed {
  Layout layout;
  Buffer<uint8_t> blob;

  Packed(const Layout& l, Random& random) : layout(l), blob(l.total_bytes()) {
    for (int e = 0; e < layout.experts(); ++e) {
      for (const Projection p : {kGate, kUp, kDown}) {
        const Dims& d = layout.dims(p);
        if (!d.present()) continue;
        std::vector<uint8_t> codes(size_t(d.rows) * d.columns / 2), zeros(size_t(d.rows) * d.groups());
        for (auto& c : codes) c = uint8_t(random.next());
        for (auto& z : zeros) z = uint8_t(random.below(16));
        Words scales = random_words(zeros.size(), random, 0.002f, 0.02f);
        std::vector<float> bias(static_cast<size_t>(d.rows), 0.01f);
        std::vector<int32_t> perm;
        for (int k = 0; k < d.columns; ++k) perm.push_back(d.columns - 1 - k);
        pack(layout, blob.data(), e, p,
             {codes.data(), reinterpret_cast<uint8_t*>(scales.data()), d.zeros ? zeros.data() : nullptr,
              d.bias ? bias.data() : nullptr, d.perm ? perm.data() : nullptr}, nullptr, 1);
      }
    }
  }
};

inline Words multiply(const DecodeLinear& p, int rows, const Words& x) {
  Words y(size_t(rows) * p.rows);
  if (!p.layout) {
    dense_linear(p.dense, rows, x.data(), y.data(), false, 1);
    return y;
  }
  linear_forward({p.layout, p.kernels, p.blob, x.data(), kType, rows, p.columns, y.data(), p.rows, 1});
  return y;
}

inline void add(Words& to, const Words& x) {
  for (size_t i = 0; i < to.size(); ++i) to[i] = float_to_bf16(bf16_to_float(to[i]) + bf16_to_float(x[i]));
}

}  // namespace tests
