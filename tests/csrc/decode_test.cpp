// A decoding step in one call against the single operations that it is made of: equal bits, on any number of threads.
#include <cstdio>
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cases.h"
#include "core/attention.h"
#include "core/compact.h"
#include "core/cpu_features.h"
#include "core/dense.h"
#include "core/elementwise.h"
#include "decode_parts.h"
#include "isa/float_bits.h"
#include "kernels_test.h"
#include "memory.h"

namespace tests {

using namespace int4moe;

namespace {

constexpr int kHidden = 96, kInner = 56, kHeads = 6, kKvHeads = 2, kHeadDim = 32, kExperts = 6, kTopK = 2, kLayers = 7, kMlp = 72;
constexpr int kRoom = 320;
// Tokens in the cache of each sequence; keys are in blocks of 64 and runs of 256.
const std::vector<int64_t> kLengths = [] {
  std::vector<int64_t> lengths;
  for (int r = 0; r < kDecodeRows; ++r) lengths.push_back(std::vector<int64_t>{70, 3, 300, 1, 63, 255, 256, 2}[size_t(r) % 8]);
  return lengths;
}();

struct Model {
  Random random{31};
  // The second layer has act-order and biases in its first linear, and a dense one for keys (another, the sixth's, is in 12 bits); the third norms over all
  // heads together. The fourth has a scored MLP beside its experts, the fifth one without a score, the sixth no experts;
  // the seventh chooses by sigmoids.
  std::vector<Packed> linears, experts;
  std::vector<Words> words;  // norms, routers and dense weights
  std::vector<std::unique_ptr<Compact>> compact;
  std::vector<DecodeLayer> layers;
  std::vector<float> sigmoid;
  Words cos, sin;
  bool avx512;

  int turned;

  Model(const Kernels& k, int part) : avx512(k.features & kAvx512), turned(part) {
    linears.reserve(8 * kLayers);
    experts.reserve(kLayers);
    words.reserve(12 * kLayers);
    for (int i = 0; i < kLayers; ++i) {
      DecodeLayer l;
      l.input_norm = keep(kHidden, 0.1f, 1);
      l.post_norm = keep(kHidden, 0.1f, 1);
      l.eps = l.head_eps = 1e-6f;
      l.q = int4(k, kHeads * kHeadDim, kHidden, i == 1);
      l.k = i == 1 ? dense(kKvHeads * kHeadDim, kHidden) : int4(k, kKvHeads * kHeadDim, kHidden, false);
      l.v = int4(k, kKvHeads * kHeadDim, kHidden, false);
      l.o = int4(k, kHidden, kHeads * kHeadDim, false);
      if (i == 0) {
        l.q_norm = keep(kHeadDim, 0.1f, 1);
        l.k_norm = keep(kHeadDim, 0.1f, 1);
      }
      if (i == 2) {
        l.whole_norms = true;
        l.q_norm = keep(kHeads * kHeadDim, 0.1f, 1);
        l.k_norm = keep(kKvHeads * kHeadDim, 0.1f, 1);
      }
      l.scale = 0.25f;
      if (i >= 3 && i < 6) {
        l.gate = int4(k, kMlp, kHidden, i == 4);
        l.up = i == 5 ? dense(kMlp, kHidden, true) : int4(k, kMlp, kHidden, false);
        l.down = int4(k, kHidden, kMlp, i == 4);
      }
      if (i == 3) l.score = dense(1, kHidden);
      if (i == 5) {
        layers.push_back(l);
        continue;
      }
      if (i == 6) {
        sigmoid = std::vector<float>(size_t(kExperts) * (kHidden + 1));
        for (float& w : sigmoid) w = 0.1f * random.normal();
        l.float_router = {sigmoid.data(), sigmoid.data() + size_t(kExperts) * kHidden, 2, 1, 1.5f};
      }
      if (i != 6) l.router = keep(size_t(kExperts) * kHidden, 0.1f);
      l.normalise = i == 0;
      l.score_type = i ? FloatType::kFloat32 : FloatType::kBFloat16;
      l.top_k = kTopK;
      experts.emplace_back(Layout(kExperts, dims(kInner, kHidden, 32, i == 1), dims(kInner, kHidden, 32, i == 1), dims(kHidden, kInner, 56, false)), random);
      l.experts.layout = &experts.back().layout;
      l.experts.blob = experts.back().blob.data();
      l.experts.kernels = &k;
      layers.push_back(l);
    }
    cos = random_words(2 * kHeadDim, random, 0.5f);
    sin = random_words(2 * kHeadDim, random, 0.5f);
  }

  const uint16_t* keep(size_t count, float scale, float offset = 0) {
    words.push_back(random_words(count, random, scale, offset));
    return words.back().data();
  }

  DecodeLinear int4(const Kernels& k, int rows, int columns, bool more) {
    linears.emplace_back(Layout(1, Dims{}, dims(rows, columns, columns % 32 ? 24 : 32, more), Dims{}), random);
    return {&linears.back().layout, &k, linears.back().blob.data(), {}, rows, columns};
  }

  DecodeLinear dense(int rows, int columns, bool in_12_bits = false) {
    const uint16_t* w = keep(size_t(rows) * columns, 0.05f);
    if (in_12_bits) compact.push_back(Compact::pack(w, rows, columns, 1));
    return {nullptr, nullptr, nullptr, {w, in_12_bits ? &compact.back()->words() : nullptr, keep(size_t(rows), 0.01f), rows, columns},
            rows, columns};
  }
};

// Hidden states and the caches of all layers, before or after a step.
struct State {
  Words hidden, caches[2 * kLayers];

  // Random where there are tokens: an emulated CPU takes its time for random numbers.
  State(int rows, Random random) {
    hidden = random_words(size_t(rows) * kHidden, random, 1);
    for (auto& c : caches) {
      c.resize(size_t(rows) * kKvHeads * kRoom * kHeadDim);
      for (int i = 0; i < rows * kKvHeads; ++i) {
        const Words used = random_words(size_t(kLengths[size_t(i / kKvHeads)]) * kHeadDim, random, 0.5f);
        std::copy(used.begin(), used.end(), c.begin() + int64_t(i) * kRoom * kHeadDim);
      }
    }
  }
  bool operator==(const State& o) const {
    for (int i = 0; i < 2 * kLayers; ++i) {
      if (caches[i] != o.caches[i]) return false;
    }
    return hidden == o.hidden;
  }
};

constexpr int64_t kStride[3] = {int64_t(kKvHeads) * kRoom * kHeadDim, int64_t(kRoom) * kHeadDim, kHeadDim};

void in_one_call(const Model& m, int rows, int threads, State& s) {
  std::vector<DecodeCache> caches;
  for (int i = 0; i < kLayers; ++i) {
    for (int r = 0; r < rows; ++r) {
      caches.push_back({s.caches[2 * i].data() + r * kStride[0], s.caches[2 * i + 1].data() + r * kStride[0],
                        {kStride[1], kStride[2]}, {kStride[1], kStride[2]}});
    }
  }
  const DecodeArgs args{rows, s.hidden.data(), m.cos.data(), m.sin.data(), 2, caches.data(), kLengths.data(), threads};
  decode_step({kHidden, kHeads, kKvHeads, kHeadDim, m.avx512, m.turned, {}}, m.layers, args);
}

void one_by_one(const Model& m, int rows, State& s) {
  for (int i = 0; i < kLayers; ++i) {
    const DecodeLayer& l = m.layers[size_t(i)];
    Words normed(s.hidden.size());
    rms_norm(kType, rows, kHidden, s.hidden.data(), l.input_norm, l.eps, normed.data(), 1);
    Words q = multiply(l.q, rows, normed), k = multiply(l.k, rows, normed), v = multiply(l.v, rows, normed);
    if (l.whole_norms) {
      rms_norm(kType, rows, kHeads * kHeadDim, q.data(), l.q_norm, l.head_eps, q.data(), 1);
      rms_norm(kType, rows, kKvHeads * kHeadDim, k.data(), l.k_norm, l.head_eps, k.data(), 1);
    }
    const uint16_t *q_norm = l.whole_norms ? nullptr : l.q_norm, *k_norm = l.whole_norms ? nullptr : l.k_norm;
    rotate({kType, rows, kHeads, kHeadDim, q.data(), m.cos.data(), m.sin.data(), 2, q_norm, l.head_eps, m.turned}, 1);
    rotate({kType, rows, kKvHeads, kHeadDim, k.data(), m.cos.data(), m.sin.data(), 2, k_norm, l.head_eps, m.turned}, 1);
    Words mixed(q.size());
    for (int r = 0; r < rows; ++r) {
      uint16_t *keys = s.caches[2 * i].data() + r * kStride[0], *values = s.caches[2 * i + 1].data() + r * kStride[0];
      for (int h = 0; h < kKvHeads; ++h) {
        const int64_t at = h * kStride[1] + kLengths[size_t(r)] * kHeadDim, from = (r * kKvHeads + h) * kHeadDim;
        std::memcpy(keys + at, k.data() + from, kHeadDim * 2);
        std::memcpy(values + at, v.data() + from, kHeadDim * 2);
      }
      const int64_t first = int64_t(r) * kHeads * kHeadDim;
      attention({kType, 1, kHeads, kKvHeads, 1, kLengths[size_t(r)] + 1, kHeadDim, kHeadDim, {q.data() + first, {0, kHeadDim, 0}},
                 {keys, {0, kStride[1], kStride[2]}}, {values, {0, kStride[1], kStride[2]}}, mixed.data() + first, l.scale, m.avx512}, 1);
    }
    add(s.hidden, multiply(l.o, rows, mixed));

    rms_norm(kType, rows, kHidden, s.hidden.data(), l.post_norm, l.eps, normed.data(), 1);
    Words mlp, y(s.hidden.size());
    if (l.up.rows) {
      Words gate = multiply(l.gate, rows, normed), up = multiply(l.up, rows, normed);
      gated_silu(kType, rows, kMlp, gate.data(), up.data(), gate.data(), 1);
      mlp = multiply(l.down, rows, gate);
    }
    if (!l.top_k) {
      add(s.hidden, mlp);
      continue;
    }
    Words logits(size_t(rows) * kExperts);
    std::vector<float> scores(size_t(rows) * kTopK);
    std::vector<int64_t> ids(size_t(rows) * kTopK);
    if (l.router) {
      dense_linear({l.router, nullptr, nullptr, kExperts, kHidden}, rows, normed.data(), logits.data(), false, 1);
      softmax_top_k({kType, rows, kExperts, kTopK, logits.data(), l.normalise, l.score_type, scores.data(), ids.data()}, 1);
    } else {
      std::vector<float> wide(logits.size());
      float_linear(rows, kExperts, kHidden, normed.data(), l.float_router.weight, wide.data(), 1);
      sigmoid_top_k({rows, kExperts, kTopK, l.float_router.groups, l.float_router.top_groups, wide.data(), l.float_router.bias, l.normalise,
                     l.float_router.factor, scores.data(), ids.data()}, 1);
    }
    Routing r;
    r.ids = ids.data();
    r.id_stride[0] = r.weight_stride[0] = kTopK;
    r.id_stride[1] = r.weight_stride[1] = 1;
    r.weights = scores.data();
    r.weight_type = l.score_type;
    r.tokens = rows;
    r.top_k = kTopK;
    ExpertsArgs a = l.experts;
    a.x = normed.data();
    a.type = kType;
    a.x_stride = a.y_stride = kHidden;
    a.y = y.data();
    experts_forward(a, r);
    if (l.score.rows) {
      const Words score = multiply(l.score, rows, normed);
      add_scaled(kType, rows, kHidden, y.data(), mlp.data(), score.data(), y.data(), 1);
    } else if (l.up.rows) {
      add(y, mlp);
    }
    add(s.hidden, y);
  }
}

void test_decode(const Model& model, const std::string& name) {
  for (const int rows : {1, 2, 5, kDecodeRows}) {
    const State before(rows, Random(7));
    State expected = before;
    one_by_one(model, rows, expected);
    bool finite = true;
    for (const uint16_t h : expected.hidden) finite = finite && (h & 0x7f80) != 0x7f80;
    check(finite, "%s: hidden states of %d sequences are finite", name.c_str(), rows);
    for (const int threads : {1, 3, 7}) {
      if (rows == kDecodeRows && threads != 3) continue;
      State found = before;
      in_one_call(model, rows, threads, found);
      check(found == expected, "%s: a step of %d sequences on %d threads has the bits of its parts", name.c_str(), rows,
            threads);
    }
  }
}

// A step that found no memory leaves hidden states as they were, and can be repeated.
void test_memory(const Model& model) {
  for (const int rows : {1, 3}) {
    const State before(rows, Random(7));
    State expected = before, found = before;
    in_one_call(model, rows, 1, expected);
    const auto call = [&] { in_one_call(model, rows, 3, found); };
    test_without_memory("a step", call, [&] { return std::exchange(found, before) == expected; });
  }
}

}  // namespace

void test_decode(const Kernels& k) {
  if (!dense_available() || !(k.types & type_bit(kType))) return;
  test_decode(Model(k, kHeadDim), row_name(k));
  if (std::strcmp(k.isa, "avx2")) return;
  // Rows of kernels have no part in these.
  test_decode(Model(k, kHeadDim / 2), row_name(k) + ", half of each head turned");
  test_memory(Model(k, kHeadDim));
}

}  // namespace tests
