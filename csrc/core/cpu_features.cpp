#include "core/cpu_features.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace int4moe {

namespace {

uint64_t xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

bool amx_permitted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

uint32_t read() {
  uint32_t a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  const bool osxsave = c & (1u << 27), avx = c & (1u << 28), fma = c & (1u << 12), f16c = c & (1u << 29);
  if (!osxsave || !avx) return 0;
  const uint64_t saved = xcr0();
  uint32_t a7, b7, c7, d7, a71 = 0, b71, c71, d71;
  if (!__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7)) return 0;
  if (a7 >= 1) __get_cpuid_count(7, 1, &a71, &b71, &c71, &d71);

  uint32_t have = 0;
  constexpr uint64_t kYmm = 0x6, kZmm = 0xe6, kTiles = 0x60000;
  if ((saved & kYmm) == kYmm && (b7 & (1u << 5)) && fma && f16c) {
    have |= kAvx2;
    if (a71 & (1u << 4)) have |= kAvxVnni;
  }
  const uint32_t avx512 = (1u << 16) | (1u << 17) | (1u << 30) | (1u << 31);  // F, DQ, BW, VL
  if ((have & kAvx2) && (saved & kZmm) == kZmm && (b7 & avx512) == avx512) {
    have |= kAvx512;
    if (c7 & (1u << 11)) have |= kAvx512Vnni;
    if (a71 & (1u << 5)) have |= kAvx512Bf16;
    if (d7 & (1u << 23)) have |= kAvx512Fp16;
  }
  if ((saved & kTiles) == kTiles && (d7 & (1u << 24)) && amx_permitted()) {
    have |= kAmxTile;
    if (d7 & (1u << 25)) have |= kAmxInt8;
  }
  return have;
}

}  // namespace

uint32_t cpu_features() {
  static const uint32_t features = read();
  return features;
}

}  // namespace int4moe
