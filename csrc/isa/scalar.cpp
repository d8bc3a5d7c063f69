// The row that needs nothing: plain C++ for any x86-64, and what the other rows are compared with in tests.
#include <cmath>
#include <cstring>

#include "isa/float_bits.h"
#include "isa/kernels.h"

namespace int4moe {
namespace scalar {
namespace {

float scale_at(const Matrix& m, const uint8_t* scales, int index) {
  if (m.scale_type == ScaleType::kFloat32) {
    float f;
    std::memcpy(&f, scales + 4 * size_t(index), 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, scales + 2 * size_t(index), 2);
  return m.scale_type == ScaleType::kFloat16 ? fp16_to_float(h) : bf16_to_float(h);
}

int zero_at(const uint8_t* zeros, int group, int r) {
  return zeros ? (zeros[group * (kBlockRows / 2) + r / 2] >> (r % 2 * 4)) & 15 : 8;
}

int code_at(const uint8_t* lane, int column) { return (lane[column & 3] >> (column & 4)) & 15; }

// --- w4a16: a row is float [lines * 8], then the sum of each group

size_t row_bytes_f(const Matrix& m) {
  return (size_t(m.lines) * kLineColumns + m.groups) * sizeof(float) / 64 * 64 + 64;
}

void prepare_f(const Matrix& m, const float* x, uint8_t* row) {
  auto* values = reinterpret_cast<float*>(row);
  float* sums = values + size_t(m.lines) * kLineColumns;
  std::memset(values, 0, size_t(m.lines) * kLineColumns * sizeof(float));
  std::memcpy(values, x, size_t(m.columns) * sizeof(float));
  for (int g = 0; g < m.groups; ++g) {
    float sum = 0;
    for (int k = g * m.group_size; k < m.columns && k < (g + 1) * m.group_size; ++k) sum += x[k];
    sums[g] = sum;
  }
}

void multiply_f(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                const uint8_t*) {
  for (int i = 0; i < rows.count; ++i) {
    const auto* x = reinterpret_cast<const float*>(rows.at(i));
    const float* sums = x + size_t(m.lines) * kLineColumns;
    for (int b = 0; b < blocks; ++b) {
      const uint8_t* codes = m.block_codes(first + b);
      const uint8_t* scales = m.block_scales(first + b);
      const uint8_t* zeros = m.block_zeros(first + b);
      for (int r = 0; r < kBlockRows; ++r) {
        float total = 0;
        for (int g = 0; g < m.groups; ++g) {
          float sum = float(-zero_at(zeros, g, r)) * sums[g];
          for (int k = g * m.group_size; k < m.columns && k < (g + 1) * m.group_size; ++k) {
            sum += float(code_at(codes + size_t(k / 8) * kLineBytes + 4 * r, k & 7)) * x[k];
          }
          total += sum * scale_at(m, scales, g * kBlockRows + r);
        }
        out[i * out_stride + b * kBlockRows + r] = total;
      }
    }
  }
}

// --- w4a8: a row is int8 [lines * 8], then for each segment the scale of x (float) and the sum of its int8 (int32). A
// segment is 32 columns, or what is left of a group.

constexpr int kSegmentColumns = 32;

int segments_per_group(const Matrix& m) { return (m.group_size + kSegmentColumns - 1) / kSegmentColumns; }

size_t row_bytes_i(const Matrix& m) {
  return (size_t(m.lines) * kLineColumns + 8 * size_t(m.groups) * size_t(segments_per_group(m))) / 64 * 64 + 64;
}

// Columns [from, to) of each segment of a matrix in turn.
struct Segments {
  const Matrix& m;
  int group = 0, from = 0, to = 0, index = -1;

  bool next() {
    from = to;
    if (from >= m.columns) return false;
    group = from / m.group_size;
    const int end = (group + 1) * m.group_size < m.columns ? (group + 1) * m.group_size : m.columns;
    to = from + kSegmentColumns < end ? from + kSegmentColumns : end;
    ++index;
    return true;
  }
};

void prepare_i(const Matrix& m, const float* x, uint8_t* row) {
  auto* values = reinterpret_cast<int8_t*>(row);
  auto* scales = reinterpret_cast<float*>(row + size_t(m.lines) * kLineColumns);
  auto* sums = reinterpret_cast<int32_t*>(scales + m.groups * segments_per_group(m));
  std::memset(values, 0, size_t(m.lines) * kLineColumns);
  for (Segments s{m}; s.next();) {
    float largest = 0;
    for (int k = s.from; k < s.to; ++k) largest = std::fabs(x[k]) > largest ? std::fabs(x[k]) : largest;
    float nothing = 0;  // or NaN once a value is not finite
    for (int k = s.from; k < s.to; ++k) nothing += x[k] * 0.0f;
    // Below 1e-30 the inverse would overflow, and nothing that small matters.
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    int sum = 0;
    for (int k = s.from; k < s.to; ++k) {
      values[k] = int8_t(std::lrintf(x[k] * inverse));
      sum += values[k];
    }
    scales[s.index] = largest / 127.0f + nothing;
    sums[s.index] = sum;
  }
}

void multiply_i(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                const uint8_t*) {
  for (int i = 0; i < rows.count; ++i) {
    const uint8_t* row = rows.at(i);
    const auto* x = reinterpret_cast<const int8_t*>(row);
    const auto* x_scales = reinterpret_cast<const float*>(row + size_t(m.lines) * kLineColumns);
    const auto* sums = reinterpret_cast<const int32_t*>(x_scales + m.groups * segments_per_group(m));
    for (int b = 0; b < blocks; ++b) {
      const uint8_t* codes = m.block_codes(first + b);
      const uint8_t* scales = m.block_scales(first + b);
      const uint8_t* zeros = m.block_zeros(first + b);
      for (int r = 0; r < kBlockRows; ++r) {
        float total = 0;
        for (Segments s{m}; s.next();) {
          int sum = -zero_at(zeros, s.group, r) * sums[s.index];
          for (int k = s.from; k < s.to; ++k) {
            sum += code_at(codes + size_t(k / 8) * kLineBytes + 4 * r, k & 7) * x[k];
          }
          total += float(sum) * (scale_at(m, scales, s.group * kBlockRows + r) * x_scales[s.index]);
        }
        out[i * out_stride + b * kBlockRows + r] = total;
      }
    }
  }
}

// --- elementwise

float function(ActivationKind kind, float x) {
  switch (kind) {
    case ActivationKind::kSilu:
      return x / (1.0f + std::exp(-x));
    case ActivationKind::kGelu:
      return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f));
    case ActivationKind::kGeluTanh:
      return 0.5f * x * (1.0f + std::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    default: {
      const float r = x > 0 ? x : (x != x ? x : 0);
      return r * r;
    }
  }
}

void activate(ActivationKind kind, float alpha, float limit, const float* gate, const float* up, float* h,
              size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (kind == ActivationKind::kSwigluClamped) {
      const float g = gate[i] > limit ? limit : gate[i];
      const float u = up[i] > limit ? limit : (up[i] < -limit ? -limit : up[i]);
      h[i] = g / (1.0f + std::exp(-alpha * g)) * (u + 1.0f);
    } else {
      h[i] = gate ? function(kind, gate[i]) * up[i] : function(kind, up[i]);
    }
  }
}

float load_one(FloatType type, const void* x, size_t i) {
  switch (type) {
    case FloatType::kFloat16:
      return fp16_to_float(static_cast<const uint16_t*>(x)[i]);
    case FloatType::kBFloat16:
      return bf16_to_float(static_cast<const uint16_t*>(x)[i]);
    case FloatType::kFloat32:
      return static_cast<const float*>(x)[i];
    default:
      return float(static_cast<const double*>(x)[i]);
  }
}

void load(FloatType type, const void* x, const int32_t* perm, float* dst, size_t count) {
  for (size_t j = 0; j < count; ++j) dst[j] = load_one(type, x, perm ? size_t(perm[j]) : j);
}

void store(FloatType type, const float* x, void* dst, size_t count) {
  for (size_t j = 0; j < count; ++j) {
    switch (type) {
      case FloatType::kFloat16:
        static_cast<uint16_t*>(dst)[j] = float_to_fp16(x[j]);
        break;
      case FloatType::kBFloat16:
        static_cast<uint16_t*>(dst)[j] = float_to_bf16(x[j]);
        break;
      case FloatType::kFloat32:
        static_cast<float*>(dst)[j] = x[j];
        break;
      default:
        static_cast<double*>(dst)[j] = double(x[j]);
    }
  }
}

void accumulate(float weight, const float* x, const float* bias, float* y, size_t count) {
  for (size_t j = 0; j < count; ++j) y[j] += weight * (bias ? x[j] + bias[j] : x[j]);
}

}  // namespace
}  // namespace scalar

extern const Kernels kScalarW4A16, kScalarW4A8;
const Kernels kScalarW4A16 = {"scalar",         "w4a16",          0,           1,
                              scalar::row_bytes_f, scalar::prepare_f, scalar::multiply_f, scalar::activate,
                              scalar::load,     scalar::store,    scalar::accumulate};
const Kernels kScalarW4A8 = {"scalar",         "w4a8",           0,           1,
                             scalar::row_bytes_i, scalar::prepare_i, scalar::multiply_i, scalar::activate,
                             scalar::load,     scalar::store,    scalar::accumulate};

}  // namespace int4moe
