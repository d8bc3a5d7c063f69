#include <cstring>

#include "cases.h"
#include "core/cpu_features.h"
#include "kernels_test.h"

namespace tests {

using namespace int4moe;

namespace {

// The palette of this thread's tile configuration; 0 is none. As bytes (sttilecfg), for compilers without AMX.
int palette() {
  alignas(64) uint8_t config[64];
  __asm__ volatile(".byte 0xc4, 0xe2, 0x79, 0x49, 0x00" : : "a"(config) : "memory");  // sttilecfg [rax]
  return config[0];
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
  check(palette() == 0, "%s: the tile configuration is released at the end of a call", row_name(k).c_str());
}

}  // namespace tests
