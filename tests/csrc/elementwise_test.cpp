// load, store, accumulate and activate of a row against the scalar row.
#include <cmath>
#include <cstring>
#include <vector>

#include "cases.h"
#include "isa/float_bits.h"
#include "kernels_test.h"

namespace tests {

using namespace int4moe;

const Kernels& scalar_row();

namespace {

constexpr int kMost = 40;

const char* type_name(FloatType t) { return t == FloatType::kFloat16 ? "float16" : t == FloatType::kBFloat16 ? "bfloat16" : "float32"; }

// Values that conversions get wrong: ties, limits, denormals, infinities, NaN.
const float kValues[] = {0.0f,      -0.0f,     1.0f,       1.00390625f, 1.01171875f, -1.0009765f, 65504.0f,  65519.9f,
                         65520.0f,  -70000.0f, 6.1e-5f,    5.97e-8f,    2.98e-8f,    2.99e-8f,    1e-40f,    -1e-45f,
                         3.4e38f,   3.3961e38f, INFINITY,  -INFINITY,   NAN,         0.1f,        -2.7183f,  123456.0f};

bool same_or_nan(float a, float b) { return (std::isnan(a) && std::isnan(b)) || !std::memcmp(&a, &b, 4); }

float widened(FloatType type, const void* data, int i) {
  if (type == FloatType::kFloat32) return static_cast<const float*>(data)[i];
  const uint16_t h = static_cast<const uint16_t*>(data)[i];
  return type == FloatType::kFloat16 ? fp16_to_float(h) : bf16_to_float(h);
}

void test_store_and_load(const Kernels& k, const std::string& name) {
  constexpr int kCount = int(sizeof(kValues) / sizeof(kValues[0]));
  for (const FloatType type : {FloatType::kFloat16, FloatType::kBFloat16, FloatType::kFloat32}) {
    for (int count = 1; count <= kMost; ++count) {
      Buffer<float> x(kMost), loaded(kMost + 1);
      Buffer<uint8_t> found(kMost * 4 + 4), expected(kMost * 4 + 4);
      std::vector<int32_t> perm;
      for (int i = 0; i < kMost; ++i) x[size_t(i)] = kValues[(i + count) % kCount];
      for (int i = 0; i < count; ++i) perm.push_back((i * 7 + 3) % count);
      k.store(type, x.data(), found.data(), size_t(count));
      scalar_row().store(type, x.data(), expected.data(), size_t(count));
      for (int i = 0; i < count; ++i) {
        const float a = widened(type, found.data(), i), b = widened(type, expected.data(), i);
        check(same_or_nan(a, b), "%s: %.9g as %s is %.9g, not %.9g", name.c_str(), double(x[size_t(i)]),
              type_name(type), double(b), double(a));
      }
      const size_t end = size_t(count) * (type == FloatType::kFloat32 ? 4 : 2);
      check(found[end] == 0xa5, "%s: store of %d %s writes no more", name.c_str(), count, type_name(type));
      for (const int32_t* p : {static_cast<const int32_t*>(nullptr), static_cast<const int32_t*>(perm.data())}) {
        k.load(type, expected.data(), p, loaded.data(), size_t(count));
        for (int i = 0; i < count; ++i) {
          const float b = widened(type, expected.data(), p ? p[i] : i);
          check(same_or_nan(loaded[size_t(i)], b), "%s: load of %s %d of %d%s", name.c_str(), type_name(type), i, count,
                p ? " permuted" : "");
        }
        uint32_t behind;
        std::memcpy(&behind, &loaded[size_t(count)], 4);
        check(behind == 0xa5a5a5a5u, "%s: load of %d %s writes no more", name.c_str(), count, type_name(type));
        std::memset(loaded.data(), 0xa5, (kMost + 1) * 4);
      }
    }
  }
}

void test_accumulate(const Kernels& k, const std::string& name) {
  Random random(3);
  for (int count = 1; count <= kMost; ++count) {
    for (const bool with_bias : {false, true}) {
      Buffer<float> x(kMost), bias(kMost), y(kMost + 1);
      std::vector<double> exact;
      for (int i = 0; i < kMost; ++i) {
        x[size_t(i)] = random.normal();
        bias[size_t(i)] = random.normal();
        if (i < count) {
          y[size_t(i)] = random.normal();
          exact.push_back(double(y[size_t(i)]) + 0.7 * (double(x[size_t(i)]) + (with_bias ? double(bias[size_t(i)]) : 0.0)));
        }
      }
      k.accumulate(0.7f, x.data(), with_bias ? bias.data() : nullptr, y.data(), size_t(count));
      for (int i = 0; i < count; ++i) {
        check(std::fabs(double(y[size_t(i)]) - exact[size_t(i)]) < 1e-6, "%s: accumulate %d of %d", name.c_str(), i, count);
      }
      uint32_t behind;
      std::memcpy(&behind, &y[size_t(count)], 4);
      check(behind == 0xa5a5a5a5u, "%s: accumulate of %d writes no more", name.c_str(), count);
    }
  }
}

// In float64, by the definitions of int4moe_ipex/moe/activations.py.
double activation(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kSilu:
      return x / (1 + std::exp(-x));
    case ActivationKind::kGelu:
      return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case ActivationKind::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    default:
      return x > 0 ? x * x : 0;
  }
}

void test_activate(const Kernels& k, const std::string& name) {
  constexpr ActivationKind kKinds[] = {ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kGeluTanh,
                                       ActivationKind::kRelu2, ActivationKind::kSwigluClamped};
  constexpr int kCount = 512;
  Buffer<float> gate(kCount), up(kCount), h(kCount);
  Random random(5);
  for (const ActivationKind kind : kKinds) {
    const double alpha = 1.702f, limit = 2.5f;
    for (const bool gated : {true, false}) {
      const bool clamped = kind == ActivationKind::kSwigluClamped;
      if (clamped && !gated) continue;
      for (int i = 0; i < kCount; ++i) {
        gate[size_t(i)] = float(i - kCount / 2) * 0.05f;
        up[size_t(i)] = gated ? random.normal() * 3 : gate[size_t(i)];
      }
      gate[0] = -200.0f;  // its exponential is beyond float32
      gate[1] = 200.0f;
      if (!gated) up[0] = -200.0f, up[1] = 200.0f;
      k.activate(kind, float(alpha), float(limit), gated ? gate.data() : nullptr, up.data(), h.data(), kCount);
      for (int i = 0; i < kCount; ++i) {
        const double g = double(gate[size_t(i)]), u = double(up[size_t(i)]);
        double exact = gated ? activation(kind, g) * u : activation(kind, u);
        if (clamped) {
          const double a = std::fmin(g, limit), b = std::fmax(-limit, std::fmin(u, limit));
          exact = a / (1 + std::exp(-alpha * a)) * (b + 1);
        }
        // Left of the maximum 1 + erf and 1 + tanh cancel: the error is relative to the factors, not to the result.
        const double scale = std::fabs(exact) + 0.1 * std::fabs(gated ? g * u : u) + 1e-30;
        check(std::fabs(double(h[size_t(i)]) - exact) <= 2e-6 * scale, "%s: activation %d of gate %g, up %g is %.9g, not %.9g",
              name.c_str(), int(kind), g, u, exact, double(h[size_t(i)]));
      }
      gate[7] = NAN;
      up[7] = gated ? 1.0f : NAN;
      k.activate(kind, float(alpha), float(limit), gated ? gate.data() : nullptr, up.data(), h.data(), 16);
      if (!clamped) check(std::isnan(h[7]), "%s: activation %d of NaN is NaN", name.c_str(), int(kind));
    }
  }
}

}  // namespace

void test_elementwise(const Kernels& k) {
  const std::string name = row_name(k);
  test_store_and_load(k, name);
  test_accumulate(k, name);
  test_activate(k, name);
}

}  // namespace tests
