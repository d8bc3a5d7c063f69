// Bytes of packed int4 weights: the layout "n16k8".
//
// A matrix W [N, K] is cut into blocks of 16 rows and lines of 8 columns. One line of one block is 64 bytes: lane r
// (32 bits, little endian) holds 8 codes of row r. Byte i of a lane has column k+i in its low nibble and column
// k+4+i in its high nibble, so that masking the low (high) nibbles gives 4 bytes in the order of the activations.
//   codes  [blocks][lines][16] uint32     blocks = ceil(N/16), lines = ceil(K/8); padding is code 0
//   scales [blocks][groups][16]           fp16, bf16 or fp32 as stored; padding rows have scale 0
//   zeros  [blocks][groups][8] uint8      two rows per byte, low nibble = even row; absent when all are 8
// Columns are in canonical order (groups contiguous); group_size is a multiple of 8 unless there is one group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace int4moe {

constexpr int kBlockRows = 16;
constexpr int kLineColumns = 8;
constexpr int kLineBytes = 64;

enum class ScaleType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };
enum class FloatType : int { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };
enum class ActivationKind : int { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3, kSwigluClamped = 4 };

inline size_t scale_bytes(ScaleType t) { return t == ScaleType::kFloat32 ? 4 : 2; }

// What is fixed of one projection of all experts (or of a single linear).
struct Dims {
  int rows = 0;        // N; 0 says that the projection is absent (experts without a gate)
  int columns = 0;     // K
  int group_size = 0;  // columns per scale; groups = ceil(K / group_size)
  ScaleType scale_type = ScaleType::kFloat16;
  bool zeros = false;  // has zero points of its own; otherwise every zero point is 8
  bool bias = false;   // float32 [N]
  bool perm = false;   // int32 [K]: packed column j is original column perm[j]; perm[0] == -1 means the identity

  bool present() const { return rows > 0; }
  int blocks() const { return (rows + kBlockRows - 1) / kBlockRows; }
  int lines() const { return (columns + kLineColumns - 1) / kLineColumns; }
  int groups() const { return (columns + group_size - 1) / group_size; }
  size_t code_bytes() const { return size_t(blocks()) * lines() * kLineBytes; }
  size_t scales_bytes() const { return size_t(blocks()) * groups() * kBlockRows * scale_bytes(scale_type); }
  size_t zeros_bytes() const { return zeros ? size_t(blocks()) * groups() * (kBlockRows / 2) : 0; }
};

// Where one projection lies inside an expert's record; SIZE_MAX when absent.
struct Offsets {
  size_t codes = SIZE_MAX, scales = SIZE_MAX, zeros = SIZE_MAX, bias = SIZE_MAX, perm = SIZE_MAX;
};

// One matrix of one expert, ready for a kernel.
struct Matrix {
  const uint8_t* codes = nullptr;
  const uint8_t* scales = nullptr;
  const uint8_t* zeros = nullptr;  // null: every zero point is 8
  int rows = 0, columns = 0, group_size = 0;
  int blocks = 0, lines = 0, groups = 0;
  ScaleType scale_type = ScaleType::kFloat16;
  // Its input is what an activation function and a product gave (down's is): heavier tails than hidden states have.
  bool heavy_tails = false;

  int group_lines() const { return (group_size + kLineColumns - 1) / kLineColumns; }
  const uint8_t* block_codes(int block) const { return codes + size_t(block) * lines * kLineBytes; }
  const uint8_t* block_scales(int block) const {
    return scales + size_t(block) * groups * kBlockRows * scale_bytes(scale_type);
  }
  const uint8_t* block_zeros(int block) const {
    return zeros ? zeros + size_t(block) * groups * (kBlockRows / 2) : nullptr;
  }
};

enum Projection { kGate = 0, kUp = 1, kDown = 2, kProjections = 3 };

// All experts of a layer, one record of `expert_bytes` after the other. A single linear is a layer of one expert whose
// only projection is kUp. When down has a permutation it is folded into the rows of gate and up: packed row j of those
// is original row perm_down[j], so that the intermediate activations come out in down's column order.
class Layout {
 public:
  Layout(int experts, const Dims& gate, const Dims& up, const Dims& down);

  int experts() const { return experts_; }
  const Dims& dims(Projection p) const { return dims_[p]; }
  const Offsets& offsets(Projection p) const { return offsets_[p]; }
  size_t expert_bytes() const { return expert_bytes_; }
  // An int32 per expert: bit p says that projection p came without zero points although dims.zeros makes room for them.
  size_t flags_offset() const { return flags_offset_; }
  size_t total_bytes() const { return expert_bytes_ * size_t(experts_); }

  Matrix matrix(const uint8_t* blob, int expert, Projection p) const;
  const float* bias(const uint8_t* blob, int expert, Projection p) const;
  // null when the columns of this expert's projection are in their original order
  const int32_t* perm(const uint8_t* blob, int expert, Projection p) const;

 private:
  int experts_;
  Dims dims_[kProjections];
  Offsets offsets_[kProjections];
  size_t flags_offset_ = 0;
  size_t expert_bytes_ = 0;
};

}  // namespace int4moe
