#include <cstring>

#include "cases.h"
#include "core/cpu_features.h"
#include "kernels_test.h"

namespace tests {

using namespace int4moe;

namespace {

// Whether this thread has a tile configuration: component 17 is not in its initial state (XGETBV with ECX = 1).
// (Component 18, the data, is left out: Bochs 3.0 reports it the wrong way round.)
bool configured() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(1));
  return low & (1u << 17);
}

}  // namespace

void test_tiles_released(const Kernels& k) {
  if (std::strcmp(k.isa, "amx") || !(cpu_features() & kAmxTile)) return;
  Random random(1);
  Weight w({32, 64, 32, Zeros::kNone, ScaleType::kFloat16}, random, false);
  const Matrix m = w.matrix();
  Buffer<uint8_t> row(k.row_bytes(m) * 20);
  std::vector<float> x(64, 1.0f);
  for (size_t i = 0; i < 20; ++i) k.prepare(m, x.data(), row.data() + k.row_bytes(m) * i);
  Buffer<float> out(32 * 20);
  k.multiply(m, 0, m.blocks, {row.data(), k.row_bytes(m), nullptr, 20}, out.data(), 32, nullptr);
  check(!configured(), "%s: the tile configuration is released at the end of a call", row_name(k).c_str());
}

}  // namespace tests
