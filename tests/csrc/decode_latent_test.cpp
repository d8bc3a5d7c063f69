// A decoding step over latents in one call against the single operations that it is made of: equal bits.
#include <cstring>
#include <string>
#include <vector>

#include "cases.h"
#include "core/attention.h"
#include "core/cpu_features.h"
#include "core/elementwise.h"
#include "core/head_linear.h"
#include "decode_parts.h"
#include "kernels_test.h"

namespace tests {

namespace {

constexpr int kHidden = 96, kHeads = 16, kParts = 2, kRank = 64, kTurned = 32, kNope = 32, kValue = 24, kKey = kRank + kTurned;
constexpr int kShort = 64, kMlp = 72, kExperts = 8, kTopK = 2, kInner = 56, kLayers = 3, kRoom = 320;
const int64_t kLengths[] = {300, 3, 70, 1, 255};

struct LatentModel {
  Random random{17};
  std::vector<Packed> linears, experts;
  std::vector<Words> words;
  std::vector<float> router, numbers;
  std::vector<DecodeLayer> layers;
  Words table;
  bool avx512;
  DecodeLatentShape shape;

  // The first layer's queries go through another linear, and its keys are dense; the second has experts, and the third too,
  // which it chooses with a bias.
  LatentModel(const Kernels& k, bool apart, bool complex) : avx512(k.features & kAvx512) {
    shape = {kRank, kNope, kValue, complex ? FloatType::kFloat32 : FloatType::kBFloat16, apart};
    linears.reserve(8 * kLayers);
    experts.reserve(kLayers);
    words.reserve(12 * kLayers);
    for (int i = 0; i < kLayers; ++i) {
      DecodeLayer l;
      l.input_norm = keep(kHidden, 0.1f, 1);
      l.post_norm = keep(kHidden, 0.1f, 1);
      l.eps = l.head_eps = 1e-6f;
      if (i == 0) {
        l.latent.query = int4(k, kShort, kHidden);
        l.q_norm = keep(kShort, 0.1f, 1);
      }
      l.q = int4(k, kHeads * (kNope + kTurned), i == 0 ? kShort : kHidden);
      l.k = i == 0 ? dense(kKey, kHidden) : int4(k, kKey, kHidden);
      l.k_norm = keep(kRank, 0.1f, 1);
      l.o = int4(k, kHidden, kHeads * kValue);
      l.latent.w_key = keep(size_t(kHeads) * kRank * kNope, 0.2f);
      l.latent.w_value = keep(size_t(kHeads) * kValue * kRank, 0.2f);
      l.scale = 0.125f;
      if (i < 2) {
        l.gate = int4(k, kMlp, kHidden);
        l.up = int4(k, kMlp, kHidden);
        l.down = int4(k, kHidden, kMlp);
      }
      if (i > 0) {
        if (router.empty()) {
          for (int j = 0; j < kExperts * (kHidden + 1); ++j) router.push_back(0.1f * random.normal());
        }
        const float* bias = i == 2 ? router.data() + kExperts * kHidden : nullptr;
        l.float_router = {router.data(), bias, 4, 2, 1.5f};
        l.score_type = FloatType::kFloat32;
        l.top_k = kTopK;
        const Dims inner = dims(kInner, kHidden, 32, false);
        experts.emplace_back(Layout(kExperts, inner, inner, dims(kHidden, kInner, 56, false)), random);
        l.experts.layout = &experts.back().layout;
        l.experts.blob = experts.back().blob.data();
        l.experts.kernels = &k;
      }
      layers.push_back(l);
    }
    table = random_words(4 * kTurned, random, 0.5f);
    for (const uint16_t w : table) numbers.push_back(bf16_to_float(w));
  }

  const uint16_t* keep(size_t count, float scale, float offset = 0) {
    words.push_back(random_words(count, random, scale, offset));
    return words.back().data();
  }

  DecodeLinear int4(const Kernels& k, int rows, int columns) {
    linears.emplace_back(Layout(1, Dims{}, dims(rows, columns, columns % 32 ? 24 : 32, false), Dims{}), random);
    return {&linears.back().layout, &k, linears.back().blob.data(), {}, rows, columns};
  }

  DecodeLinear dense(int rows, int columns) { return {nullptr, nullptr, nullptr, {keep(size_t(rows) * columns, 0.05f), nullptr, nullptr, rows, columns}, rows, columns}; }

  // Of two positions, cos before sin.
  const void* cos() const { return shape.tables == FloatType::kFloat32 ? static_cast<const void*>(numbers.data()) : table.data(); }
  const void* sin() const {
    return shape.tables == FloatType::kFloat32 ? static_cast<const void*>(numbers.data() + 2 * kTurned) : table.data() + 2 * kTurned;
  }
};

struct LatentState {
  Words hidden, caches[kLayers];  // [rows, room, rank + turned]

  LatentState(int rows, Random random) {
    hidden = random_words(size_t(rows) * kHidden, random, 1);
    for (Words& c : caches) {
      for (int r = 0; r < rows; ++r) {
        const Words used = random_words(size_t(kLengths[r]) * kKey, random, 0.5f);
        c.insert(c.end(), used.begin(), used.end());
        c.resize(size_t(r + 1) * kRoom * kKey);
      }
    }
  }
  bool operator==(const LatentState& o) const {
    for (int i = 0; i < kLayers; ++i) {
      if (caches[i] != o.caches[i]) return false;
    }
    return hidden == o.hidden;
  }
};

void in_one_call(const LatentModel& m, int rows, int threads, LatentState& s) {
  std::vector<DecodeCache> caches;
  for (Words& c : s.caches) {
    for (int r = 0; r < rows; ++r) {
      uint16_t* first = c.data() + size_t(r) * kRoom * kKey;
      caches.push_back({first, first + kRank, {kRoom * kKey, kKey}, {kRoom * kKey, kKey}});
    }
  }
  DecodeShape shape{kHidden, kHeads, kParts, kKey, m.avx512, kTurned, m.shape};
  decode_step(shape, m.layers, {rows, s.hidden.data(), m.cos(), m.sin(), 2, caches.data(), kLengths, threads});
}

Words attended(const LatentModel& m, const DecodeLayer& l, int rows, const Words& normed, Words& cache) {
  constexpr int kWidth = kNope + kTurned;
  Words query = normed;
  if (l.latent.query.rows) {
    query = multiply(l.latent.query, rows, normed);
    rms_norm(kType, rows, kShort, query.data(), l.q_norm, l.head_eps, query.data(), 1);
  }
  query = multiply(l.q, rows, query);
  Words compressed = multiply(l.k, rows, normed);
  const auto turn = [&](Words& x, int heads, int width, int first) {
    rotate_pairs({kType, rows, heads, kTurned, x.data() + first, {heads * width, width}, m.shape.tables, m.cos(), m.sin(), 2, 1, m.shape.apart}, 1);
  };
  turn(query, kHeads, kWidth, kNope);
  turn(compressed, 1, kKey, kRank);
  Words wide(size_t(rows) * kHeads * kKey), mixed(size_t(rows) * kHeads * kRank), out(size_t(rows) * kHeads * kValue);
  head_linear({rows, kHeads, kRank, kNope, query.data(), {kHeads * kWidth, kWidth}, l.latent.w_key, wide.data(), {kHeads * kKey, kKey}}, 1);
  for (int i = 0; i < rows * kHeads; ++i) std::memcpy(&wide[size_t(i) * kKey + kRank], &query[size_t(i) * kWidth + kNope], kTurned * 2);
  for (int r = 0; r < rows; ++r) {
    uint16_t *first = cache.data() + size_t(r) * kRoom * kKey, *last = first + kLengths[r] * kKey;
    rms_norm(kType, 1, kRank, &compressed[size_t(r) * kKey], l.k_norm, l.head_eps, last, 1);
    std::memcpy(last + kRank, &compressed[size_t(r) * kKey + kRank], kTurned * 2);
    const Heads shared{first, {0, 0, kKey}};
    attention({kType, 1, kHeads, kParts, 1, kLengths[r] + 1, kKey, kRank, {&wide[size_t(r) * kHeads * kKey], {0, kKey, 0}}, shared,
               shared, &mixed[size_t(r) * kHeads * kRank], l.scale, m.avx512}, 1);
  }
  head_linear({rows, kHeads, kValue, kRank, mixed.data(), {kHeads * kRank, kRank}, l.latent.w_value, out.data(), {kHeads * kValue, kValue}}, 1);
  return multiply(l.o, rows, out);
}

Words chosen_experts(const DecodeLayer& l, int rows, const Words& normed) {
  std::vector<float> logits(size_t(rows) * kExperts), scores(size_t(rows) * kTopK);
  std::vector<int64_t> ids(scores.size());
  const DecodeFloatRouter& f = l.float_router;
  float_linear(rows, kExperts, kHidden, normed.data(), f.weight, logits.data(), 1);
  if (f.bias) {
    sigmoid_top_k({rows, kExperts, kTopK, f.groups, f.top_groups, logits.data(), f.bias, l.normalise, f.factor, scores.data(), ids.data()}, 1);
  } else {
    softmax_top_k({FloatType::kFloat32, rows, kExperts, kTopK, logits.data(), l.normalise, l.score_type, scores.data(), ids.data(),
                   f.groups, f.top_groups, f.factor}, 1);
  }
  Routing r;
  r.ids = ids.data();
  r.id_stride[0] = r.weight_stride[0] = kTopK;
  r.id_stride[1] = r.weight_stride[1] = 1;
  r.weights = scores.data();
  r.weight_type = l.score_type;
  r.tokens = rows;
  r.top_k = kTopK;
  Words y(normed.size());
  ExpertsArgs a = l.experts;
  a.x = normed.data();
  a.type = kType;
  a.x_stride = a.y_stride = kHidden;
  a.y = y.data();
  experts_forward(a, r);
  return y;
}

void one_by_one(const LatentModel& m, int rows, LatentState& s) {
  for (int i = 0; i < kLayers; ++i) {
    const DecodeLayer& l = m.layers[size_t(i)];
    Words normed(s.hidden.size());
    rms_norm(kType, rows, kHidden, s.hidden.data(), l.input_norm, l.eps, normed.data(), 1);
    add(s.hidden, attended(m, l, rows, normed, s.caches[i]));
    rms_norm(kType, rows, kHidden, s.hidden.data(), l.post_norm, l.eps, normed.data(), 1);
    Words y;
    if (l.top_k) y = chosen_experts(l, rows, normed);
    if (l.up.rows) {
      Words gate = multiply(l.gate, rows, normed), up = multiply(l.up, rows, normed);
      gated_silu(kType, rows, kMlp, gate.data(), up.data(), gate.data(), 1);
      const Words mlp = multiply(l.down, rows, gate);
      y.empty() ? void(y = mlp) : add(y, mlp);
    }
    add(s.hidden, y);
  }
}

}  // namespace

void test_decode_latent(const Kernels& k) {
  if (!dense_available() || !(k.types & type_bit(kType))) return;
  for (const bool apart : {false, true}) {
    const LatentModel model(k, apart, !apart);
    for (const int rows : {1, 2, 5}) {
      const LatentState before(rows, Random(7));
      LatentState expected = before;
      one_by_one(model, rows, expected);
      bool finite = true;
      for (const uint16_t h : expected.hidden) finite = finite && (h & 0x7f80) != 0x7f80;
      check(finite && !(expected.hidden == before.hidden), "%s: latents of %d sequences are finite", row_name(k).c_str(), rows);
      for (const int threads : {1, 3}) {
        LatentState found = before;
        in_one_call(model, rows, threads, found);
        check(found == expected, "%s: a step over latents of %d sequences on %d threads has the bits of its parts",
              row_name(k).c_str(), rows, threads);
      }
    }
  }
}

}  // namespace tests
