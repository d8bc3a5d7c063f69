#include "cases.h"

#include <cmath>
#include <cstring>

#include "core/pack.h"
#include "isa/float_bits.h"

namespace tests {

using namespace int4moe;

namespace {

const char* const kTypes[] = {"float16", "bfloat16", "float32"};

Layout layout_of(const Shape& s) {
  Dims d;
  d.rows = s.rows;
  d.columns = s.columns;
  d.group_size = s.group_size;
  d.scale_type = s.scale_type;
  d.zeros = s.zeros != Zeros::kNone;
  return Layout(1, Dims{}, d, Dims{});
}

void put_scale(ScaleType type, float value, uint8_t* at) {
  if (type == ScaleType::kFloat32) {
    std::memcpy(at, &value, 4);
    return;
  }
  const uint16_t h = type == ScaleType::kFloat16 ? float_to_fp16(value) : float_to_bf16(value);
  std::memcpy(at, &h, 2);
}

}  // namespace

std::string Shape::name() const {
  static const char* const kZeros[] = {"no zeros", "zeros 8", "zeros"};
  return "N " + std::to_string(rows) + ", K " + std::to_string(columns) + ", group " + std::to_string(group_size) +
         ", " + kZeros[int(zeros)] + ", " + kTypes[int(scale_type)] + " scales" + (heavy_tails ? ", heavy tails" : "");
}

Weight::Weight(const Shape& shape, Random& random, bool unit_scales)
    : shape_(shape), layout_(layout_of(shape)), blob_(layout_.total_bytes()) {
  const size_t n = size_t(shape.rows), k = size_t(shape.columns), g = size_t(groups());
  codes_.resize(n * k / 2);
  for (auto& byte : codes_) byte = uint8_t(random.next());
  if (shape.zeros != Zeros::kNone) {
    zeros_.resize(n * g);
    for (auto& z : zeros_) z = shape.zeros == Zeros::kEight ? 8 : uint8_t(random.below(16));
  }
  scales_.resize(n * g);
  std::vector<uint8_t> stored(n * g * scale_bytes(shape.scale_type));
  for (size_t i = 0; i < n * g; ++i) {
    const auto as_type = FloatType(int(shape.scale_type));
    scales_[i] = unit_scales ? 1.0f : round_to(as_type, (0.5f + random.unit()) * 0.02f * (random.below(8) ? 1 : -1));
    put_scale(shape.scale_type, scales_[i], stored.data() + i * scale_bytes(shape.scale_type));
  }
  Canonical from;
  from.codes = codes_.data();
  from.scales = stored.data();
  from.zeros = zeros_.empty() ? nullptr : zeros_.data();
  pack(layout_, blob_.data(), 0, kUp, from, nullptr, 1);
}

int Weight::code(int row, int column) const {
  const uint8_t byte = codes_[(size_t(row) * size_t(shape_.columns) + size_t(column)) / 2];
  return column % 2 ? byte >> 4 : byte & 15;
}

int Weight::to(int group) const {
  const int end = from(group) + shape_.group_size;
  return end < shape_.columns ? end : shape_.columns;
}

double Weight::exact(int row, const float* x) const {
  double total = 0;
  for (int g = 0; g < groups(); ++g) {
    double sum = 0;
    for (int k = from(g); k < to(g); ++k) sum += double(code(row, k) - zero(row, g)) * double(x[k]);
    total += sum * double(scale(row, g));
  }
  return total;
}

double Weight::exact_w4a8(int row, const float* x, int segment) const {
  double total = 0;
  for (int g = 0; g < groups(); ++g) {
    for (int first = from(g); first < to(g); first += segment) {
      const int end = first + segment < to(g) ? first + segment : to(g);
      float largest = 0;
      for (int k = first; k < end; ++k) largest = std::fmax(largest, std::fabs(x[k]));
      const float inverse = largest > 0 ? 127.0f / largest : 0.0f;
      int64_t sum = 0;
      for (int k = first; k < end; ++k) sum += (code(row, k) - zero(row, g)) * std::lrintf(x[k] * inverse);
      total += double(sum) * double(scale(row, g)) * double(largest) / 127.0;
    }
  }
  return total;
}

float round_to(FloatType type, float x) {
  if (type == FloatType::kFloat16) return fp16_to_float(float_to_fp16(x));
  if (type == FloatType::kBFloat16) return bf16_to_float(float_to_bf16(x));
  return x;
}

double Error::value() const { return norm_ > 0 ? std::sqrt(difference_ / norm_) : std::sqrt(difference_); }

bool is_w4a8(const Kernels& k) { return !std::strcmp(k.compute, "w4a8"); }

int segment_columns(const Kernels& k, bool heavy_tails) {
  const bool wide = !std::strcmp(k.isa, "avx512") || !std::strcmp(k.isa, "amx");
  return !wide ? 32 : heavy_tails ? 64 : 128;
}

Meant meant_for(const Kernels& k) {
  if (is_w4a8(k)) return {FloatType::kFloat32, 1.5e-2};
  if (k.types & type_bit(FloatType::kFloat32)) return {FloatType::kFloat32, 4e-6};
  return {FloatType::kFloat16, 1e-4};  // 16-bit activations, before the result is rounded to 16 bits
}

std::string row_name(const Kernels& k) {
  std::string types;
  for (const int t : {0, 1, 2}) {
    if (k.types & (1u << t)) types += std::string(types.empty() ? "" : "+") + kTypes[t];
  }
  return std::string(k.isa) + "/" + k.compute + " for " + types;
}

}  // namespace tests
