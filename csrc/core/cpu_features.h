// CPUID and XCR0, read once. A kernel row runs only when all bits that it needs are here.
#pragma once

#include <cstdint>

namespace int4moe {

enum Feature : uint32_t {
  kAvx2 = 1u << 0,  // with FMA and F16C
  kAvxVnni = 1u << 1,
  kAvx512 = 1u << 2,  // F, BW, VL, DQ
  kAvx512Vnni = 1u << 3,
  kAvx512Bf16 = 1u << 4,
  kAvx512Fp16 = 1u << 5,
  kAmxTile = 1u << 6,
  kAmxInt8 = 1u << 7,
};

// What the CPU has and the operating system saves. AMX bits are set only once the kernel has granted the permission
// (arch_prctl ARCH_REQ_XCOMP_PERM), which this asks for.
uint32_t cpu_features();

}  // namespace int4moe
