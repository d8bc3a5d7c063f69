#include "core/layout.h"

#include <stdexcept>
#include <string>

namespace int4moe {

namespace {

void check(const Dims& d, const char* name) {
  if (!d.present()) return;
  const bool one_group = d.group_size == d.columns;
  if (d.columns <= 0 || d.columns % 2 || d.group_size < 1 || d.group_size > d.columns ||
      (!one_group && d.group_size % kLineColumns)) {
    throw std::invalid_argument(std::string(name) + ": columns must be even and group_size a multiple of 8 (or all columns)");
  }
}

size_t align(size_t n, size_t to) { return (n + to - 1) / to * to; }

}  // namespace

Layout::Layout(int experts, const Dims& gate, const Dims& up, const Dims& down)
    : experts_(experts), dims_{gate, up, down} {
  if (experts < 1 || !up.present()) throw std::invalid_argument("a layout needs at least one expert and an up projection");
  check(gate, "gate");
  check(up, "up");
  check(down, "down");
  if (gate.present() && (gate.rows != up.rows || gate.columns != up.columns)) {
    throw std::invalid_argument("gate and up must have the same shape");
  }
  if (down.present() && (down.columns != up.rows || down.rows != up.columns)) {
    throw std::invalid_argument("down must have the transposed shape of up");
  }
  // Codes first (64-byte lines), then what needs less alignment, so that a record is padded once.
  size_t at = 0;
  for (int p = 0; p < kProjections; ++p) {
    if (!dims_[p].present()) continue;
    offsets_[p].codes = at;
    at += dims_[p].code_bytes();
  }
  for (int p = 0; p < kProjections; ++p) {
    if (!dims_[p].present()) continue;
    offsets_[p].scales = at;
    at += dims_[p].scales_bytes();
  }
  for (int p = 0; p < kProjections; ++p) {
    if (!dims_[p].present() || !dims_[p].zeros) continue;
    offsets_[p].zeros = at;
    at += dims_[p].zeros_bytes();
  }
  at = align(at, 4);
  for (int p = 0; p < kProjections; ++p) {
    if (dims_[p].bias) {
      offsets_[p].bias = at;
      at += size_t(dims_[p].rows) * 4;
    }
    if (dims_[p].perm) {
      offsets_[p].perm = at;
      at += size_t(dims_[p].columns) * 4;
    }
  }
  flags_offset_ = at;
  expert_bytes_ = align(at + 4, kLineBytes);
}

Matrix Layout::matrix(const uint8_t* blob, int expert, Projection p) const {
  const Dims& d = dims_[p];
  const Offsets& o = offsets_[p];
  const uint8_t* base = blob + expert_bytes_ * size_t(expert);
  Matrix m;
  m.codes = base + o.codes;
  m.scales = base + o.scales;
  m.zeros = d.zeros ? base + o.zeros : nullptr;
  m.rows = d.rows;
  m.columns = d.columns;
  m.group_size = d.group_size;
  m.blocks = d.blocks();
  m.lines = d.lines();
  m.groups = d.groups();
  m.scale_type = d.scale_type;
  m.heavy_tails = p == kDown;
  return m;
}

const float* Layout::bias(const uint8_t* blob, int expert, Projection p) const {
  if (!dims_[p].bias) return nullptr;
  return reinterpret_cast<const float*>(blob + expert_bytes_ * size_t(expert) + offsets_[p].bias);
}

const int32_t* Layout::perm(const uint8_t* blob, int expert, Projection p) const {
  if (!dims_[p].perm) return nullptr;
  const auto* perm = reinterpret_cast<const int32_t*>(blob + expert_bytes_ * size_t(expert) + offsets_[p].perm);
  return perm[0] < 0 ? nullptr : perm;
}

}  // namespace int4moe
