// The decoder of int4moe_ipex/models/decode.py, which has checked types, shapes and who keeps the memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <optional>
#include <utility>

#include "bindings.h"
#include "bindings_caches.h"
#include "core/decode.h"

namespace int4moe {

namespace {

// A linear as `Decoder.add_layer` takes it.
struct PyDecodeLinear {
  DecodeLinear linear;
  std::optional<Layout> layout;  // of an int4 one
};

PyDecodeLinear int4_linear(const PyLinear& handle, uintptr_t blob) {
  PyDecodeLinear p{{}, handle.layout()};
  p.linear.kernels = handle.kernels(FloatType::kBFloat16);
  p.linear.blob = address<const uint8_t>(blob);
  const Dims& d = p.layout->dims(kUp);
  p.linear.rows = d.rows;
  p.linear.columns = d.columns;
  return p;
}

PyDecodeLinear bfloat16_linear(uintptr_t weight, const Compact* compact, uintptr_t bias, int rows, int columns) {
  PyDecodeLinear p;
  p.linear.dense = dense_weight(weight, compact, bias, rows, columns);
  p.linear.rows = rows;
  p.linear.columns = columns;
  return p;
}

// Rows of a table of `count`, one behind the other; false, and nothing written, where an id is none of its rows.
bool take_rows(uintptr_t table, int64_t count, int64_t row_bytes, const std::vector<int64_t>& ids, uintptr_t y) {
  if (std::any_of(ids.begin(), ids.end(), [&](int64_t id) { return id < 0 || id >= count; })) return false;
  for (size_t i = 0; i < ids.size(); ++i) {
    std::memcpy(address<char>(y) + int64_t(i) * row_bytes, address<const char>(table) + ids[i] * row_bytes,
                size_t(row_bytes));
  }
  return true;
}

class PyDecoder {
 public:
  PyDecoder(int hidden, int heads, int kv_heads, int head_dim, bool avx512, int turned)
      : shape_{hidden, heads, kv_heads, head_dim, avx512, turned} {}

  void add_layer(std::pair<uintptr_t, uintptr_t> norms, float eps, const std::vector<PyDecodeLinear>& qkvo,
                 std::pair<uintptr_t, uintptr_t> head_norms, bool whole_norms, float head_eps, float scale) {
    DecodeLayer l;
    l.input_norm = address<const uint16_t>(norms.first);
    l.post_norm = address<const uint16_t>(norms.second);
    l.eps = eps;
    if (shape_.latent.rank) {
      take(qkvo, {&l.q, &l.k, &l.o});
    } else {
      take(qkvo, {&l.q, &l.k, &l.v, &l.o});
    }
    l.q_norm = address<const uint16_t>(head_norms.first);
    l.k_norm = address<const uint16_t>(head_norms.second);
    l.whole_norms = whole_norms;
    l.head_eps = head_eps;
    l.scale = scale;
    layers_.push_back(l);
  }

  // For all layers, before the first: core/decode.h's DecodeLatentShape.
  void set_latent(int rank, int nope, int value_dim, int tables, bool apart) {
    shape_.latent = {rank, nope, value_dim, FloatType(tables), apart};
  }

  // To the last layer, whose linears are q, k and o: what a query goes through first, if it does, and each head's own matrices.
  void add_latents(const std::vector<PyDecodeLinear>& query, uintptr_t w_key, uintptr_t w_value) {
    DecodeLatentLayer& l = layers_.back().latent;
    take(query, {&l.query});
    l.w_key = address<const uint16_t>(w_key);
    l.w_value = address<const uint16_t>(w_value);
  }

  // To the last layer.
  void add_experts(uintptr_t router, bool normalise, int score_type, int top_k, const PyExperts& experts, uintptr_t blob) {
    DecodeLayer& l = layers_.back();
    l.router = address<const uint16_t>(router);
    l.normalise = normalise;
    l.score_type = FloatType(score_type);
    l.top_k = top_k;
    l.experts = experts.fixed(FloatType::kBFloat16);
    l.experts.layout = keep(experts.layout());
    l.experts.blob = address<const uint8_t>(blob);
  }

  // In place of the router that `add_experts` got none of.
  void set_float_router(uintptr_t weight, uintptr_t bias, int groups, int top_groups, float factor) {
    layers_.back().float_router = {address<const float>(weight), address<const float>(bias), groups, top_groups, factor};
  }

  // To the last layer: gate, up and down, and the score if there is one.
  void add_mlp(const std::vector<PyDecodeLinear>& linears) {
    DecodeLayer& l = layers_.back();
    take(linears, {&l.gate, &l.up, &l.down, &l.score});
  }

  void step(uintptr_t hidden, uintptr_t cos, uintptr_t sin, int cos_rows, const PyDecodeCaches& caches, int threads) {
    const int rows = caches.rows();
    if (rows > kDecodeRows || caches.lengths.size() != size_t(rows) || caches.layers() != int(layers_.size())) {
      throw std::invalid_argument("rows or caches do not fit the decoder");
    }
    for (int i = 0, all = shape_.latent.rank ? rows * caches.layers() : 0; i < all; ++i) {
      const DecodeCache& c = caches.where()[i];
      if (c.values != c.keys + shape_.latent.rank || c.key_stride[1] != c.value_stride[1]) {
        throw std::invalid_argument("what is turned does not lie behind the latents");
      }
    }
    double seconds[kDecodeParts] = {};
    run(hidden, cos, sin, cos_rows, caches, threads, timed ? seconds : nullptr);
    for (int i = 0; i < kDecodeParts; ++i) seconds_[size_t(i)] += seconds[i];
  }

  // Seconds of attention, router and experts since the last call, of the steps while `timed`.
  std::vector<double> take_seconds() { return std::exchange(seconds_, std::vector<double>(kDecodeParts)); }

  bool timed = false;

 private:
  void run(uintptr_t hidden, uintptr_t cos, uintptr_t sin, int cos_rows, const PyDecodeCaches& caches, int threads,
           double* seconds) const {
    nb::gil_scoped_release release;
    const DecodeArgs args{caches.rows(), address<uint16_t>(hidden), address<const void>(cos),
                          address<const void>(sin), cos_rows, caches.where(), caches.lengths.data(),
                          std::max(threads, 1), seconds};
    decode_step(shape_, layers_, args);
  }

  void take(const std::vector<PyDecodeLinear>& from, std::initializer_list<DecodeLinear*> to) {
    DecodeLinear* const* at = to.begin();
    for (const PyDecodeLinear& p : from) {
      **at = p.linear;
      if (p.layout) (*at)->layout = keep(*p.layout);
      ++at;
    }
  }

  const Layout* keep(const Layout& layout) { return &layouts_.emplace_back(layout); }

  DecodeShape shape_;
  std::vector<DecodeLayer> layers_;
  std::vector<double> seconds_ = std::vector<double>(kDecodeParts);
  std::deque<Layout> layouts_;  // their addresses stay
};

}  // namespace

void bind_decode(nb::module_& m) {
  m.attr("decode_rows") = kDecodeRows;
  m.def("take_rows", &take_rows);
  nb::class_<PyDecodeLinear>(m, "DecodeLinear")
      .def_static("int4", &int4_linear)
      .def_static("dense", &bfloat16_linear, nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg());
  nb::class_<PyDecodeCaches>(m, "DecodeCaches")
      .def(nb::init<int, int, nb::bytes, nb::object, bool>(), nb::arg("layers"), nb::arg("rows"), nb::arg("kind"),
           nb::arg("layer_type"), nb::arg("inference"))
      .def("add", &PyDecodeCaches::add)
      .def("complete", &PyDecodeCaches::complete)
      .def("extend", &PyDecodeCaches::extend)
      .def_ro("lengths", &PyDecodeCaches::lengths);
  nb::class_<PyDecoder>(m, "Decoder")
      .def(nb::init<int, int, int, int, bool, int>(), nb::arg("hidden"), nb::arg("heads"), nb::arg("kv_heads"), nb::arg("head_dim"),
           nb::arg("avx512"), nb::arg("turned"))
      .def("add_layer", &PyDecoder::add_layer)
      .def("add_experts", &PyDecoder::add_experts)
      .def("set_float_router", &PyDecoder::set_float_router)
      .def("set_latent", &PyDecoder::set_latent)
      .def("add_latents", &PyDecoder::add_latents)
      .def("add_mlp", &PyDecoder::add_mlp)
      .def("step", &PyDecoder::step)
      .def("take_seconds", &PyDecoder::take_seconds)
      .def_rw("timed", &PyDecoder::timed);
}

}  // namespace int4moe
