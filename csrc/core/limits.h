// What this machine can do at most, measured: the two ceilings that a layer's speed is held against.
#pragma once

#include <cstddef>

namespace int4moe {

enum class Peak {
  kFmaAvx2,       // float32 FMA, 256 bits
  kFmaAvx512,     // float32 FMA, 512 bits
  kInt8Avx2,      // vpmaddubsw summed four at a time in 16 bits, then vpmaddwd
  kInt8AvxVnni,   // vpdpbusd, 256 bits, VEX
  kInt8Avx512,    // vpdpbusd, 512 bits
};

// Whether the CPU has the instructions of this peak.
bool peak_supported(Peak peak);

// Bytes per second that `threads` threads read together from memory, each its own part of `bytes` bytes (best of
// several passes; huge pages where the kernel gives them). Choose bytes well beyond the caches. 0 when out of memory.
double measure_read_bandwidth(int threads, std::size_t bytes);

// Operations per second (a multiply-add counts as two) of a loop on registers alone, on all `threads` threads
// together (best of several passes). 0 when the CPU lacks the instructions.
double measure_peak(int threads, Peak peak);

}  // namespace int4moe
