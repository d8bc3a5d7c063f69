// Canonical matrices with what a kernel should give for them, computed from the canonical codes in float64 or in
// integers: independent of the packed layout and of every kernel.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "core/layout.h"
#include "isa/kernels.h"

namespace tests {

using int4moe::Dims;
using int4moe::FloatType;
using int4moe::Kernels;
using int4moe::Layout;
using int4moe::ScaleType;

enum class Zeros { kNone, kEight, kRandom };  // without zero points; with, all 8; with, 0..15

struct Shape {
  int rows, columns, group_size;
  Zeros zeros;
  ScaleType scale_type;
  bool heavy_tails = false;  // as down has it

  std::string name() const;
};

// 64-byte aligned memory, filled with a pattern that no result contains.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t count) : bytes_(count * sizeof(T) + 64, 0xa5) {}
  T* data() {
    const auto at = reinterpret_cast<uintptr_t>(bytes_.data());
    return reinterpret_cast<T*>(bytes_.data() + (64 - at % 64) % 64);
  }
  T& operator[](size_t i) { return data()[i]; }

 private:
  std::vector<uint8_t> bytes_;
};

// A random W [N, K], packed as the only projection (up) of a layout with one expert.
class Weight {
 public:
  // unit_scales: every scale is 1, for results that are exact integers.
  Weight(const Shape& shape, Random& random, bool unit_scales);

  const Shape& shape() const { return shape_; }
  const Layout& layout() const { return layout_; }
  const uint8_t* blob() { return blob_.data(); }
  int4moe::Matrix matrix() {
    int4moe::Matrix m = layout_.matrix(blob_.data(), 0, int4moe::kUp);
    m.heavy_tails = shape_.heavy_tails;
    return m;
  }

  int groups() const { return layout_.dims(int4moe::kUp).groups(); }
  int code(int row, int column) const;
  int zero(int row, int group) const { return zeros_.empty() ? 8 : zeros_[size_t(row) * groups() + group]; }
  float scale(int row, int group) const { return scales_[size_t(row) * groups() + group]; }
  int from(int group) const { return group * shape_.group_size; }
  int to(int group) const;

  // sum (code - zero) * x * scale, exactly but for float64
  double exact(int row, const float* x) const;
  // the same on activations quantised as W4A8 does: int8 with one scale per token and segment of so many columns, or of
  // what is left of a group
  double exact_w4a8(int row, const float* x, int segment) const;

 private:
  Shape shape_;
  Layout layout_;
  std::vector<uint8_t> codes_, zeros_;
  std::vector<float> scales_;
  Buffer<uint8_t> blob_;
};

// Rounds to the type and back.
float round_to(FloatType type, float x);

// ||found - exact|| / ||exact||
class Error {
 public:
  void add(double found, double exact) {
    difference_ += (found - exact) * (found - exact);
    norm_ += exact * exact;
  }
  double value() const;

 private:
  double difference_ = 0, norm_ = 0;
};

// What a row is meant for, with the bound on its relative error against float64 for inputs of that type.
struct Meant {
  FloatType type;
  double bound;
};
Meant meant_for(const Kernels& k);
std::string row_name(const Kernels& k);

bool is_w4a8(const Kernels& k);

// Columns of a whole segment of a W4A8 row's activations.
int segment_columns(const Kernels& k, bool heavy_tails);

}  // namespace tests
