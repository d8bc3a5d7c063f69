// What Python holds of the core: layouts, and the experts or linear that run on one. Numbers and addresses only.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/compact.h"
#include "core/cpu_features.h"
#include "core/experts.h"
#include "core/linear.h"
#include "core/pack.h"

namespace nb = nanobind;

namespace int4moe {

template <class T>
T* address(uintptr_t p) {
  return reinterpret_cast<T*>(p);
}

inline DenseWeight dense_weight(uintptr_t words, const Compact* compact, uintptr_t bias, int64_t rows, int64_t columns) {
  return {address<const uint16_t>(words), compact ? &compact->words() : nullptr, address<const uint16_t>(bias), rows, columns};
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

inline Dims dims(const std::vector<int>& n, size_t at) {
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

inline Layout layout_of(int experts, const std::vector<int>& numbers) {
  if (numbers.size() != kProjections * kDimsNumbers) throw std::invalid_argument("expected 3 x 7 numbers");
  return Layout(experts, dims(numbers, 0), dims(numbers, kDimsNumbers), dims(numbers, 2 * kDimsNumbers));
}

class PyLayout {
 public:
  PyLayout(int experts, const std::vector<int>& numbers) : layout(layout_of(experts, numbers)) {}
  Layout layout;
};

inline Canonical canonical(uintptr_t codes, uintptr_t scales, uintptr_t zeros, uintptr_t bias, uintptr_t perm) {
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
    ExpertsArgs a = fixed(FloatType(type));
    a.layout = &layout_;
    a.blob = address<const uint8_t>(blob);
    a.x = address<void>(x);
    a.x_stride = x_stride;
    a.y = address<void>(y);
    a.y_stride = y_stride;
    a.threads = std::max(threads, 1);
    nb::gil_scoped_release release;
    const int64_t bad = find_bad_id(r, layout_.experts());
    if (bad < 0) experts_forward(a, r);
    return bad;
  }

  const Layout& layout() const { return layout_; }
  // What does not change from call to call, for activations of `type`; without layout, which the caller has to keep.
  ExpertsArgs fixed(FloatType type) const {
    ExpertsArgs a = args_;
    a.type = type;
    a.kernels = row_.of(type);
    return a;
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

  const Layout& layout() const { return layout_; }
  const Kernels* kernels(FloatType type) const { return row_.of(type); }

 private:
  Layout layout_;
  Row row_;
};

// Adds the decoder of whole layers to the module (bindings_decode.cpp).
void bind_decode(nb::module_& m);

// Adds what notices that a model has changed (bindings_guard.cpp).
void bind_guard(nb::module_& m);

}  // namespace int4moe
