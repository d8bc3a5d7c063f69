// Conversions of 16-bit floats in plain C++. Every function is static: each file that includes this has its own copy,
// compiled with its own flags.
#pragma once

#include <cstdint>
#include <cstring>

namespace int4moe {
namespace {

static inline float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

static inline uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

static inline float bf16_to_float(uint16_t h) { return bits_to_float(uint32_t(h) << 16); }

static inline uint16_t float_to_bf16(float f) {
  const uint32_t u = float_to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);  // NaN stays NaN
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

static inline float fp16_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000u | ((magnitude & 0x3ff) << 13));
  // Scale by 2^112 to move the exponent; exact, denormals included.
  const float value = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);
  return bits_to_float(float_to_bits(value) | sign);
}

static inline uint16_t float_to_fp16(float f) {
  const uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00);  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {  // below the least normal: let the addition round at 2^-24
    const float shifted = bits_to_float(magnitude) + 0.5f;
    return uint16_t(sign | (float_to_bits(shifted) - 0x3f000000u));
  }
  const uint32_t odd = (magnitude >> 13) & 1;
  return uint16_t(sign | ((magnitude + 0xfff + odd - 0x38000000u) >> 13));
}

}  // namespace
}  // namespace int4moe
