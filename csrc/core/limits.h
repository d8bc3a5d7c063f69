// What this machine can do at most, measured: the two ceilings that a layer's speed is held against.
#pragma once

#include <cstddef>

namespace int4moe {

// Bytes per second that `threads` threads read together from memory, each its own part of `bytes` bytes (best of
// several passes; huge pages where the kernel gives them). Choose bytes well beyond the caches. 0 when out of memory.
double measure_read_bandwidth(int threads, std::size_t bytes);

// Operations per second (a multiply-add counts as two) of a loop on registers alone, on all `threads` threads
// together (best of several passes). 0 when the CPU lacks the instructions, negative for a name that is not one of
//   fma_avx2, fma_avx512        float32 FMA
//   bf16_avx512                 vdpbf16ps
//   int8_avx2                   vpmaddubsw summed four at a time in 16 bits, then vpmaddwd
//   int8_avxvnni, int8_avx512   vpdpbusd
double measure_peak(int threads, const char* name);

}  // namespace int4moe
