// The Python boundary: numbers and addresses only. Python (backends/native/) has checked shapes, dtypes, devices and
// strides before it calls; ids are checked here, before any work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "core/attention.h"
#include "core/cpu_features.h"
#include "core/dense.h"
#include "core/elementwise.h"
#include "core/experts.h"
#include "core/limits.h"
#include "core/linear.h"
#include "core/pack.h"
#include "core/threads.h"
#include "core/unpack.h"

namespace nb = nanobind;
using namespace int4moe;

namespace {

template <class T>
T* address(uintptr_t p) {
  return reinterpret_cast<T*>(p);
}

constexpr FloatType kInputTypes[] = {FloatType::kFloat16, FloatType::kBFloat16, FloatType::kFloat32};

// The rows that (isa, compute) means on this CPU, one for each type of activations.
struct Row {
  const Kernels* kernels[3] = {};

  Row() = default;
  Row(const std::string& isa, const std::string& compute) {
    for (const FloatType t : kInputTypes) {
      if (!find_kernels(isa.c_str(), compute.c_str(), t, ~0u)) {
        throw std::invalid_argument("this build has no kernels for " + isa + "/" + compute);
      }
      kernels[int(t)] = find_kernels(isa.c_str(), compute.c_str(), t, cpu_features());
      if (!kernels[int(t)]) {
        throw std::invalid_argument("this CPU or operating system lacks what " + isa + "/" + compute + " needs");
      }
    }
  }
  const Kernels* of(FloatType t) const { return kernels[int(t)]; }
};

// numbers: rows, columns, group_size, scale_type, zeros, bias, perm
constexpr size_t kDimsNumbers = 7;

Dims dims(const std::vector<int>& n, size_t at) {
  Dims d;
  d.rows = n[at];
  d.columns = n[at + 1];
  d.group_size = n[at + 2];
  d.scale_type = ScaleType(n[at + 3]);
  d.zeros = n[at + 4];
  d.bias = n[at + 5];
  d.perm = n[at + 6];
  return d;
}

Layout layout_of(int experts, const std::vector<int>& numbers) {
  if (numbers.size() != kProjections * kDimsNumbers) throw std::invalid_argument("expected 3 x 7 numbers");
  return Layout(experts, dims(numbers, 0), dims(numbers, kDimsNumbers), dims(numbers, 2 * kDimsNumbers));
}

class PyLayout {
 public:
  PyLayout(int experts, const std::vector<int>& numbers) : layout(layout_of(experts, numbers)) {}
  Layout layout;
};

Canonical canonical(uintptr_t codes, uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t perm) {
  return {address<uint8_t>(codes), address<uint8_t>(scales), address<uint8_t>(zeros), address<float>(bias),
          address<int32_t>(perm)};
}

class PyExperts {
 public:
  PyExperts(const PyLayout& layout, const std::string& isa, const std::string& compute, int activation, float alpha,
            float limit, bool one_input)
      : layout_(layout.layout), row_(isa, compute) {
    args_.activation = ActivationKind(activation);
    args_.alpha = alpha;
    args_.limit = limit;
    args_.one_input = one_input;
  }

  // Returns -1, or the flat position of the first bad id (nothing was written then).
  int64_t forward(uintptr_t blob, int threads, int type, int64_t tokens, uintptr_t x, int64_t x_stride, uintptr_t ids,
                  bool wide_ids, int64_t id_stride0, int64_t id_stride1, uintptr_t weights, int weight_type,
                  int64_t weight_stride0, int64_t weight_stride1, int top_k, uintptr_t y, int64_t y_stride) const {
    Routing r;
    r.ids = address<void>(ids);
    r.wide_ids = wide_ids;
    r.id_stride[0] = id_stride0;
    r.id_stride[1] = id_stride1;
    r.weights = address<void>(weights);
    r.weight_type = FloatType(weight_type);
    r.weight_stride[0] = weight_stride0;
    r.weight_stride[1] = weight_stride1;
    r.tokens = tokens;
    r.top_k = top_k;
    ExpertsArgs a = args_;
    a.layout = &layout_;
    a.blob = address<const uint8_t>(blob);
    a.x = address<void>(x);
    a.type = FloatType(type);
    a.kernels = row_.of(a.type);
    a.x_stride = x_stride;
    a.y = address<void>(y);
    a.y_stride = y_stride;
    a.threads = std::max(threads, 1);
    nb::gil_scoped_release release;
    const int64_t bad = find_bad_id(r, layout_.experts());
    if (bad < 0) experts_forward(a, r);
    return bad;
  }

 private:
  Layout layout_;
  Row row_;
  ExpertsArgs args_;
};

class PyLinear {
 public:
  PyLinear(const PyLayout& layout, const std::string& isa, const std::string& compute)
      : layout_(layout.layout), row_(isa, compute) {}

  void forward(uintptr_t blob, int threads, int type, int64_t tokens, uintptr_t x, int64_t x_stride, uintptr_t y,
               int64_t y_stride) const {
    LinearArgs a;
    a.layout = &layout_;
    a.kernels = row_.of(FloatType(type));
    a.blob = address<const uint8_t>(blob);
    a.x = address<void>(x);
    a.type = FloatType(type);
    a.tokens = tokens;
    a.x_stride = x_stride;
    a.y = address<void>(y);
    a.y_stride = y_stride;
    a.threads = std::max(threads, 1);
    nb::gil_scoped_release release;
    linear_forward(a);
  }

 private:
  Layout layout_;
  Row row_;
};

}  // namespace

// Of int4moe_ipex/models/fused.py and attention.py, which have checked types and shapes.
void bind_dense(nb::module_& m) {
  m.def("dense_available", &dense_available, "whether attention and dense_linear run on this CPU");
  m.attr("dense_tokens") = kDenseTokens;
  m.def("dense_linear", [](int tokens, int64_t rows, int64_t columns, uintptr_t x, uintptr_t w, uintptr_t bias,
                           uintptr_t y, int threads) {
    nb::gil_scoped_release release;
    dense_linear(tokens, rows, columns, address<uint16_t>(x), address<uint16_t>(w), address<uint16_t>(bias),
                 address<uint16_t>(y), threads);
  });
  using Strides = std::tuple<int64_t, int64_t, int64_t>;
  m.def("attention", [](int type, int64_t batch, int heads, int kv_heads, int64_t tokens, int64_t keys, int head_dim,
                        int value_dim, uintptr_t q, Strides qs, uintptr_t k, Strides ks, uintptr_t v, Strides vs,
                        uintptr_t out, float scale, int threads) {
    const auto view = [](uintptr_t p, const Strides& s) {
      return Heads{address<void>(p), {std::get<0>(s), std::get<1>(s), std::get<2>(s)}};
    };
    AttentionArgs a{FloatType(type), batch, heads, kv_heads, tokens, keys, head_dim, value_dim,
                    view(q, qs), view(k, ks), view(v, vs), address<void>(out), scale};
    nb::gil_scoped_release release;
    attention(a, threads);
  });
}

void bind_elementwise(nb::module_& m) {
  m.def("rms_norm", [](int type, int64_t rows, int64_t columns, uintptr_t x, uintptr_t weight, float eps, uintptr_t y,
                       int threads) {
    rms_norm(FloatType(type), rows, columns, address<void>(x), address<void>(weight), eps, address<void>(y), threads);
  });
  m.def("rotate", [](int type, int64_t rows, int heads, int head_dim, uintptr_t x, uintptr_t cos, uintptr_t sin,
                     int64_t cos_rows, uintptr_t norm, float eps, int threads) {
    Rotary r;
    r.type = FloatType(type);
    r.rows = rows;
    r.heads = heads;
    r.head_dim = head_dim;
    r.x = address<void>(x);
    r.cos = address<void>(cos);
    r.sin = address<void>(sin);
    r.cos_rows = cos_rows;
    r.norm = address<void>(norm);
    r.eps = eps;
    rotate(r, threads);
  });
  m.def("softmax_top_k", [](int type, int64_t tokens, int experts, int top_k, uintptr_t logits, bool normalise,
                            int score_type, uintptr_t scores, uintptr_t ids, int threads) {
    TopK t;
    t.type = FloatType(type);
    t.tokens = tokens;
    t.experts = experts;
    t.top_k = top_k;
    t.logits = address<void>(logits);
    t.normalise = normalise;
    t.score_type = FloatType(score_type);
    t.scores = address<void>(scores);
    t.ids = address<int64_t>(ids);
    softmax_top_k(t, threads);
  });
}

NB_MODULE(_native, m) {
  m.doc() = "int4moe_ipex's C++ core; use int4moe_ipex.backends.native";

  m.def("cpu_features", &cpu_features, "bits of core/cpu_features.h that CPUID, XCR0 and the kernel grant");
  m.def("thread_runtime", &thread_runtime);
  m.def("measure_read_bandwidth", &measure_read_bandwidth, nb::arg("threads"), nb::arg("bytes"),
        nb::call_guard<nb::gil_scoped_release>(), "bytes/s that the threads read together from memory");
  m.def("measure_peak",
        [](int threads, const std::string& name) {
          nb::gil_scoped_release release;
          return measure_peak(threads, name.c_str());
        },
        nb::arg("threads"), nb::arg("name"), "operations/s on registers alone; 0: not on this CPU; names in limits.h");
  m.def("canonical_codes",
        [](int packing, uintptr_t words, int rows, int columns, uintptr_t perm, uintptr_t codes, int threads) {
          nb::gil_scoped_release release;
          canonical_codes(Packing(packing), address<const uint32_t>(words), rows, columns, address<const int32_t>(perm),
                          address<uint8_t>(codes), threads);
        });
  bind_elementwise(m);
  bind_dense(m);
  m.def("rows", [] {
    std::vector<std::vector<std::string>> rows;
    for (const Kernels* const* k = all_kernels(); *k; ++k) {
      const char *isa = (*k)->isa, *compute = (*k)->compute;
      const bool seen = std::any_of(rows.begin(), rows.end(), [&](const auto& r) { return r[0] == isa && r[1] == compute; });
      if (seen) continue;
      const bool here = std::all_of(std::begin(kInputTypes), std::end(kInputTypes), [&](FloatType t) {
        return find_kernels(isa, compute, t, cpu_features()) != nullptr;
      });
      rows.push_back({isa, compute, here ? "usable" : "not on this CPU"});
    }
    return rows;
  }, "[isa, compute, usable or not] of every row of this build, narrow to wide");

  nb::class_<PyLayout>(m, "Layout")
      .def(nb::init<int, const std::vector<int>&>(), nb::arg("experts"), nb::arg("numbers"))
      .def_prop_ro("expert_bytes", [](const PyLayout& l) { return l.layout.expert_bytes(); })
      .def_prop_ro("total_bytes", [](const PyLayout& l) { return l.layout.total_bytes(); })
      .def("pack",
           [](const PyLayout& l, uintptr_t blob, int expert, int projection, uintptr_t codes, uintptr_t scales,
              uintptr_t zeros, uintptr_t bias, uintptr_t perm, uintptr_t row_perm, int threads) {
             nb::gil_scoped_release release;
             pack(l.layout, address<uint8_t>(blob), expert, Projection(projection),
                  canonical(codes, scales, zeros, bias, perm), address<const int32_t>(row_perm), threads);
           })
      .def("unpack", [](const PyLayout& l, uintptr_t blob, int expert, int projection, uintptr_t codes,
                        uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t perm, uintptr_t row_perm,
                        int threads) {
        nb::gil_scoped_release release;
        return unpack(l.layout, address<const uint8_t>(blob), expert, Projection(projection),
               canonical(codes, scales, zeros, bias, perm), address<const int32_t>(row_perm), threads);
      });

  nb::class_<PyExperts>(m, "Experts")
      .def(nb::init<const PyLayout&, const std::string&, const std::string&, int, float, float, bool>())
      .def("forward", &PyExperts::forward);
  nb::class_<PyLinear>(m, "Linear")
      .def(nb::init<const PyLayout&, const std::string&, const std::string&>())
      .def("forward", &PyLinear::forward);
}
