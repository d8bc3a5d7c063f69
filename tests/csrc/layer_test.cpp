// A whole layer and a linear through the driver: routing, permutations, biases, activations between the projections,
// several threads, several callers at once, a forked child. Each thread of an AMX row configures tiles of its own.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "cases.h"
#include "core/experts.h"
#include "core/linear.h"
#include "core/pack.h"
#include "isa/float_bits.h"
#include "kernels_test.h"
#include "memory.h"

namespace tests {

using namespace int4moe;

namespace {

constexpr int kHidden = 72, kInner = 56, kExperts = 3, kTopK = 2, kTokens = 45, kGroup = 24;

// One projection of one expert in canonical form.
struct Stored {
  int rows, columns;
  std::vector<uint8_t> codes, zeros;
  std::vector<float> scales, bias;
  std::vector<int32_t> perm;

  Stored(int n, int k, int group, Random& random) : rows(n), columns(k) {
    const int groups = (k + group - 1) / group;
    codes.resize(size_t(n) * k / 2);
    for (auto& c : codes) c = uint8_t(random.next());
    for (int i = 0; i < n * groups; ++i) {
      zeros.push_back(uint8_t(random.below(16)));
      scales.push_back((0.5f + random.unit()) * 0.03f);
    }
    for (int i = 0; i < n; ++i) bias.push_back(random.normal() * 0.1f);
    for (int i = 0; i < k; ++i) perm.push_back(i);
    for (int i = k - 1; i > 0; --i) std::swap(perm[size_t(i)], perm[size_t(random.below(i + 1))]);
  }

  double weight(int n, int k, int group) const {  // k: canonical column
    const uint8_t byte = codes[(size_t(n) * columns + k) / 2];
    const size_t at = size_t(n) * ((columns + group - 1) / group) + k / group;
    return double((k % 2 ? byte >> 4 : byte & 15) - zeros[at]) * double(scales[at]);
  }

  std::vector<double> multiply(const std::vector<double>& x, int group) const {
    std::vector<double> y;
    for (int n = 0; n < rows; ++n) {
      double sum = double(bias[size_t(n)]);
      for (int k = 0; k < columns; ++k) sum += weight(n, k, group) * x[size_t(perm[size_t(k)])];
      y.push_back(sum);
    }
    return y;
  }

  Canonical pointers() {
    return {codes.data(), reinterpret_cast<uint8_t*>(scales.data()), zeros.data(), bias.data(), perm.data()};
  }
};

Dims dims(int rows, int columns, int group) {
  Dims d;
  d.rows = rows;
  d.columns = columns;
  d.group_size = group;
  d.scale_type = ScaleType::kFloat32;
  d.zeros = d.bias = d.perm = true;
  return d;
}

size_t bytes_of(FloatType type) { return type == FloatType::kFloat32 ? 4 : 2; }

// Bounds of the design: results are rounded to the type of the activations.
double bound_of(const Kernels& k, FloatType type) {
  if (is_w4a8(k)) return 1.5e-2;
  return type == FloatType::kFloat32 ? 2e-5 : type == FloatType::kFloat16 ? 1e-3 : 4e-3;
}

double value_at(FloatType type, const uint8_t* data, size_t i) {
  if (type == FloatType::kFloat32) {
    float f;
    std::memcpy(&f, data + 4 * i, 4);
    return double(f);
  }
  uint16_t h;
  std::memcpy(&h, data + 2 * i, 2);
  return double(type == FloatType::kFloat16 ? fp16_to_float(h) : bf16_to_float(h));
}

void put(FloatType type, float value, uint8_t* data, size_t i) {
  if (type == FloatType::kFloat32) {
    std::memcpy(data + 4 * i, &value, 4);
    return;
  }
  const uint16_t h = type == FloatType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
  std::memcpy(data + 2 * i, &h, 2);
}

class Layer {
 public:
  Layer() : layout_(kExperts, dims(kInner, kHidden, kGroup), dims(kInner, kHidden, kGroup), dims(kHidden, kInner, 8)),
            blob_(layout_.total_bytes()) {
    Random random(11);
    for (int e = 0; e < kExperts; ++e) {
      gate_.emplace_back(kInner, kHidden, kGroup, random);
      up_.emplace_back(kInner, kHidden, kGroup, random);
      down_.emplace_back(kHidden, kInner, 8, random);
      // down's permutation is folded into the rows of gate and up.
      const int32_t* fold = down_.back().perm.data();
      pack(layout_, blob_.data(), e, kGate, gate_.back().pointers(), fold, 1);
      pack(layout_, blob_.data(), e, kUp, up_.back().pointers(), fold, 1);
      pack(layout_, blob_.data(), e, kDown, down_.back().pointers(), nullptr, 1);
    }
    for (int t = 0; t < kTokens; ++t) {
      const int first = t % 5 ? random.below(kExperts) : -1;  // -1: no expert
      ids_.push_back(first);
      ids_.push_back((first + 1 + random.below(kExperts - 1)) % kExperts);
      for (int s = 0; s < kTopK; ++s) weights_.push_back(random.unit());
      for (int k = 0; k < kHidden; ++k) x_.push_back(random.normal());
    }
  }

  bool heavy_tails(Projection p) { return layout_.matrix(blob_.data(), 1, p).heavy_tails; }

  std::vector<uint8_t> run(const Kernels& k, FloatType type, int threads) {
    std::vector<uint8_t> x(x_.size() * bytes_of(type)), y(x.size());
    for (size_t i = 0; i < x_.size(); ++i) put(type, x_[i], x.data(), i);
    ExpertsArgs a;
    a.layout = &layout_;
    a.kernels = &k;
    a.blob = blob_.data();
    a.one_input = false;
    a.x = x.data();
    a.y = y.data();
    a.type = type;
    a.x_stride = a.y_stride = kHidden;
    a.threads = threads;
    Routing r;
    r.ids = ids_.data();
    r.wide_ids = false;
    r.id_stride[0] = r.weight_stride[0] = kTopK;
    r.id_stride[1] = r.weight_stride[1] = 1;
    r.weights = weights_.data();
    r.tokens = kTokens;
    r.top_k = kTopK;
    experts_forward(a, r);
    return y;
  }

  double error(FloatType type, const std::vector<uint8_t>& y) const {
    Error error;
    for (int t = 0; t < kTokens; ++t) {
      std::vector<double> x, sum(kHidden, 0.0);
      for (int k = 0; k < kHidden; ++k) x.push_back(double(round_to(type, x_[size_t(t) * kHidden + k])));
      for (int s = 0; s < kTopK; ++s) {
        const int e = ids_[size_t(t) * kTopK + s];
        if (e < 0) continue;
        const auto gate = gate_[size_t(e)].multiply(x, kGroup), up = up_[size_t(e)].multiply(x, kGroup);
        std::vector<double> h;
        for (int j = 0; j < kInner; ++j) h.push_back(gate[size_t(j)] / (1 + std::exp(-gate[size_t(j)])) * up[size_t(j)]);
        const auto out = down_[size_t(e)].multiply(h, 8);
        for (int k = 0; k < kHidden; ++k) sum[size_t(k)] += double(weights_[size_t(t) * kTopK + s]) * out[size_t(k)];
      }
      for (int k = 0; k < kHidden; ++k) error.add(value_at(type, y.data(), size_t(t) * kHidden + k), sum[size_t(k)]);
    }
    return error.value();
  }

 private:
  Layout layout_;
  Buffer<uint8_t> blob_;
  std::vector<Stored> gate_, up_, down_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_, x_;
};

// Callers on threads of their own, each with a team of its own; then a child process, which has none of the threads.
void test_callers(Layer& layer, const Kernels& k, const std::string& name, FloatType type,
                  const std::vector<uint8_t>& expected) {
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&, i] {
      for (int n = 0; n < 3; ++n) wrong += layer.run(k, type, 1 + (i + n) % 3) != expected;
    });
  }
  for (auto& caller : callers) caller.join();
  check(wrong == 0, "%s: %d of 12 calls at once differ from a call alone", name.c_str(), wrong.load());
// ThreadSanitizer allows no new threads in the child of a process with threads; AddressSanitizer's allocator may stay
// locked there.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(layer.run(k, type, 2) == expected ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  check(status == 0, "%s: after fork, two threads compute what one does (status %d)", name.c_str(), status);
#endif
}

void test_linear(const Kernels& k, const std::string& name, FloatType type) {
  constexpr int kRows = 53, kColumns = 100;
  Random random(21);
  const Layout layout(1, Dims{}, dims(kRows, kColumns, 32), Dims{});
  Buffer<uint8_t> blob(layout.total_bytes());
  Stored stored(kRows, kColumns, 32, random);
  pack(layout, blob.data(), 0, kUp, stored.pointers(), nullptr, 1);
  std::vector<uint8_t> x(size_t(kTokens) * kColumns * bytes_of(type)), y(size_t(kTokens) * kRows * bytes_of(type));
  std::vector<float> values;
  for (int i = 0; i < kTokens * kColumns; ++i) {
    values.push_back(round_to(type, random.normal()));
    put(type, values.back(), x.data(), size_t(i));
  }
  LinearArgs a;
  a.layout = &layout;
  a.kernels = &k;
  a.blob = blob.data();
  a.x = x.data();
  a.y = y.data();
  a.type = type;
  a.tokens = kTokens;
  a.x_stride = kColumns;
  a.y_stride = kRows;
  a.threads = 2;
  linear_forward(a);
  Error error;
  for (int t = 0; t < kTokens; ++t) {
    std::vector<double> row;
    for (int j = 0; j < kColumns; ++j) row.push_back(double(values[size_t(t) * kColumns + j]));
    const auto exact = stored.multiply(row, 32);
    for (int n = 0; n < kRows; ++n) error.add(value_at(type, y.data(), size_t(t) * kRows + n), exact[size_t(n)]);
  }
  check(error.value() <= bound_of(k, type), "%s: linear, relative error %.3g", name.c_str(), error.value());
  if (std::strcmp(k.isa, "scalar")) return;
  std::vector<uint8_t> found(y.size());
  a.y = found.data();
  test_without_memory("linear", [&] { linear_forward(a); }, [&] { return found == y; });
}

}  // namespace

void test_layer(const Kernels& k) {
  static Layer layer;
  const std::string name = row_name(k);
  check(layer.heavy_tails(kDown) && !layer.heavy_tails(kUp) && !layer.heavy_tails(kGate),
        "only down's input counts as heavy-tailed");
  for (const FloatType type : {FloatType::kFloat16, FloatType::kBFloat16, FloatType::kFloat32}) {
    if (!(k.types & type_bit(type))) continue;
    const std::vector<uint8_t> one = layer.run(k, type, 1);
    const double error = layer.error(type, one);
    check(error <= bound_of(k, type), "%s: layer, relative error %.3g is at most %.3g", name.c_str(), error,
          bound_of(k, type));
    for (const int threads : {2, 5}) {
      check(layer.run(k, type, threads) == one, "%s: layer on %d threads has the bits of one", name.c_str(), threads);
    }
    test_callers(layer, k, name, type, one);
    if (!std::strcmp(k.isa, "scalar")) {
      std::vector<uint8_t> y;
      test_without_memory("layer", [&] { y = layer.run(k, type, 2); }, [&] { return y == one; });
    }
    test_linear(k, name, type);
  }
}

}  // namespace tests
