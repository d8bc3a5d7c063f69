// The Python boundary: numbers and addresses only. Python (backends/native/) has checked shapes, dtypes, devices and
// strides before it calls; ids are checked here, before any work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "bindings.h"
#include "core/attention.h"
#include "core/dense.h"
#include "core/elementwise.h"
#include "core/head_linear.h"
#include "core/limits.h"
#include "core/threads.h"
#include "core/unpack.h"

using namespace int4moe;

// A number that differs, almost surely, where many of so many bytes do: some words of them, from all over.
uint64_t sample(uintptr_t at, int64_t bytes) {
  constexpr int kWords = 16;
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;
  const int64_t places = bytes - int64_t(sizeof(uint64_t));
  uint64_t sum = uint64_t(bytes);
  for (int i = 0; places >= 0 && i < kWords; ++i) {
    uint64_t word;
    std::memcpy(&word, address<const char>(at) + (uint64_t(i + 1) * kOdd >> 16) % uint64_t(places + 1), sizeof word);
    sum = (sum ^ word) * kOdd;
    sum ^= sum >> 32;
  }
  return sum;
}

// Of int4moe_ipex/models/fused.py and attention.py, which have checked types and shapes.
void bind_dense(nb::module_& m) {
  m.def("sample", &sample);
  m.def("dense_available", &dense_available, "whether attention and dense_linear run on this CPU");
  m.attr("dense_tokens") = kDenseTokens;
  // Bfloat16 weights in 12 bits each; None where that does not pay.
  nb::class_<Compact>(m, "Compact")
      .def_static("pack", [](uintptr_t words, int64_t rows, int64_t columns, int threads) {
        nb::gil_scoped_release release;
        return Compact::pack(address<const uint16_t>(words), rows, columns, threads);
      })
      .def("unpack", [](const Compact& c, uintptr_t words) {
        nb::gil_scoped_release release;
        c.unpack(address<uint16_t>(words));
      })
      .def_prop_ro("nbytes", &Compact::bytes);
  m.def("dense_linear", [](int tokens, int64_t rows, int64_t columns, uintptr_t x, uintptr_t w, const Compact* compact,
                           uintptr_t bias, uintptr_t y, bool avx512, int threads) {
    nb::gil_scoped_release release;
    dense_linear(dense_weight(w, compact, bias, rows, columns), tokens, address<uint16_t>(x), address<uint16_t>(y), avx512,
                 threads);
  }, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg(), nb::arg(), nb::arg(), nb::arg());
  m.def("float_linear", [](int tokens, int64_t rows, int64_t columns, uintptr_t x, uintptr_t w, uintptr_t y, int threads) {
    nb::gil_scoped_release release;
    float_linear(tokens, rows, columns, address<uint16_t>(x), address<float>(w), address<float>(y), threads);
  });
  using TwoStrides = std::pair<int64_t, int64_t>;
  m.def("head_linear", [](int64_t tokens, int heads, int64_t rows, int64_t columns, uintptr_t x, TwoStrides xs, uintptr_t w,
                          uintptr_t y, TwoStrides ys, bool avx512, int threads) {
    nb::gil_scoped_release release;
    head_linear({tokens, heads, rows, columns, address<uint16_t>(x), {xs.first, xs.second}, address<uint16_t>(w),
                 address<uint16_t>(y), {ys.first, ys.second}, avx512}, threads);
  });
  using Strides = std::tuple<int64_t, int64_t, int64_t>;
  m.def("attention", [](int type, int64_t batch, int heads, int kv_heads, int64_t tokens, int64_t keys, int head_dim,
                        int value_dim, uintptr_t q, Strides qs, uintptr_t k, Strides ks, uintptr_t v, Strides vs,
                        uintptr_t out, float scale, bool avx512, int threads) {
    const auto view = [](uintptr_t p, const Strides& s) {
      return Heads{address<void>(p), {std::get<0>(s), std::get<1>(s), std::get<2>(s)}};
    };
    AttentionArgs a{FloatType(type), batch, heads, kv_heads, tokens, keys, head_dim, value_dim,
                    view(q, qs), view(k, ks), view(v, vs), address<void>(out), scale, avx512};
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
                     int64_t cos_rows, int turned, uintptr_t norm, float eps, int threads) {
    Rotary r{};
    r.turned = turned;
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
  m.attr("most_turned") = kMostTurned;
  m.def("rotate_pairs", [](int type, int64_t rows, int heads, int turned, uintptr_t x, std::pair<int64_t, int64_t> stride,
                           int table_type, uintptr_t cos, uintptr_t sin, int64_t cos_rows, int step, bool apart,
                           int threads) {
    rotate_pairs({FloatType(type), rows, heads, turned, address<void>(x), {stride.first, stride.second},
                  FloatType(table_type), address<void>(cos), address<void>(sin), cos_rows, step, apart}, threads);
  });
  m.def("softmax_top_k", [](int type, int64_t tokens, int experts, int top_k, uintptr_t logits, bool normalise,
                            int score_type, uintptr_t scores, uintptr_t ids, int groups, int top_groups, float factor,
                            int threads) {
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
    t.groups = groups;
    t.top_groups = top_groups;
    t.factor = factor;
    softmax_top_k(t, threads);
  });
  m.def("sigmoid_top_k", [](int64_t tokens, int experts, int top_k, int groups, int top_groups, uintptr_t logits,
                            uintptr_t bias, bool normalise, float factor, uintptr_t scores, uintptr_t ids, int threads) {
    sigmoid_top_k({tokens, experts, top_k, groups, top_groups, address<float>(logits), address<float>(bias), normalise, factor,
                   address<float>(scores), address<int64_t>(ids)}, threads);
  });
  m.def("gated_silu", [](int type, int64_t rows, int64_t columns, uintptr_t gate, uintptr_t up, uintptr_t y, int threads) {
    nb::gil_scoped_release release;
    gated_silu(FloatType(type), rows, columns, address<void>(gate), address<void>(up), address<void>(y), threads);
  });
  m.def("add_scaled", [](int type, int64_t rows, int64_t columns, uintptr_t x, uintptr_t shared, uintptr_t score,
                         uintptr_t y, int threads) {
    nb::gil_scoped_release release;
    add_scaled(FloatType(type), rows, columns, address<void>(x), address<void>(shared), address<void>(score),
               address<void>(y), threads);
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
  bind_decode(m);
  bind_guard(m);
}
