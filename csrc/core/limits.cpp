#include "core/limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <vector>

#include "core/cpu_features.h"
#include "core/threads.h"

namespace int4moe {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// The loops are assembly as a whole: the compiler can neither drop nor reorder them, nor emit wider code elsewhere.
__attribute__((target("avx2"))) void read_all(const char* p, std::size_t bytes) {
  const char* end = p + bytes;
  __asm__ volatile(
      "1:\n"
      "vpaddd 0(%0), %%ymm0, %%ymm0\n"
      "vpaddd 32(%0), %%ymm1, %%ymm1\n"
      "vpaddd 64(%0), %%ymm2, %%ymm2\n"
      "vpaddd 96(%0), %%ymm3, %%ymm3\n"
      "vpaddd 128(%0), %%ymm4, %%ymm4\n"
      "vpaddd 160(%0), %%ymm5, %%ymm5\n"
      "vpaddd 192(%0), %%ymm6, %%ymm6\n"
      "vpaddd 224(%0), %%ymm7, %%ymm7\n"
      "add $256, %0\n"
      "cmp %1, %0\n"
      "jb 1b\n"
      "vzeroupper\n"
      : "+r"(p)
      : "r"(end)
      : "cc", "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");
}

#define INT4MOE_CLOBBERS                                                                                            \
  "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", \
      "xmm13", "xmm14", "xmm15"
// All registers start at zero: no denormals, and products that stay finite.
#define INT4MOE_LOOP(NAME, TARGET, BODY)                                                                  \
  __attribute__((target(TARGET))) void NAME(std::int64_t steps) {                                         \
    __asm__ volatile("vzeroall\n1:\n" BODY "dec %0\njnz 1b\nvzeroupper\n" : "+r"(steps) : : INT4MOE_CLOBBERS); \
  }
#define INT4MOE_TWELVE(OP)                                                                                  \
  OP("0") OP("1") OP("2") OP("3") OP("4") OP("5") OP("6") OP("7") OP("8") OP("9") OP("10") OP("11")
#define INT4MOE_FMA256(R) "vfmadd231ps %%ymm14, %%ymm13, %%ymm" R "\n"
#define INT4MOE_FMA512(R) "vfmadd231ps %%zmm14, %%zmm13, %%zmm" R "\n"
#define INT4MOE_DOT256(R) "%{vex%} vpdpbusd %%ymm14, %%ymm13, %%ymm" R "\n"
#define INT4MOE_DOT512(R) "vpdpbusd %%zmm14, %%zmm13, %%zmm" R "\n"
#define INT4MOE_BF16512(R) "vdpbf16ps %%zmm14, %%zmm13, %%zmm" R "\n"
#define INT4MOE_MADDUBS(R) "vpmaddubsw %%ymm14, %%ymm13, %%ymm" R "\n"
#define INT4MOE_QUAD(R)                                                                     \
  INT4MOE_MADDUBS("8") INT4MOE_MADDUBS("9") INT4MOE_MADDUBS("10") INT4MOE_MADDUBS("11")     \
  "vpaddw %%ymm8, %%ymm9, %%ymm8\nvpaddw %%ymm10, %%ymm11, %%ymm10\nvpaddw %%ymm8, %%ymm10, %%ymm8\n" \
  "vpmaddwd %%ymm15, %%ymm8, %%ymm8\nvpaddd %%ymm8, %%ymm" R ", %%ymm" R "\n"

INT4MOE_LOOP(fma_avx2, "avx2,fma", INT4MOE_TWELVE(INT4MOE_FMA256))
INT4MOE_LOOP(int8_avx2, "avx2",
             INT4MOE_QUAD("0") INT4MOE_QUAD("1") INT4MOE_QUAD("2") INT4MOE_QUAD("3") INT4MOE_QUAD("4")
             INT4MOE_QUAD("5") INT4MOE_QUAD("6") INT4MOE_QUAD("7"))
INT4MOE_LOOP(fma_avx512, "avx512f", INT4MOE_TWELVE(INT4MOE_FMA512))
INT4MOE_LOOP(bf16_avx512, "avx512f", INT4MOE_TWELVE(INT4MOE_BF16512))
INT4MOE_LOOP(int8_avxvnni, "avx2", INT4MOE_TWELVE(INT4MOE_DOT256))
INT4MOE_LOOP(int8_avx512, "avx512f", INT4MOE_TWELVE(INT4MOE_DOT512))

struct Loop {
  const char* name;
  void (*run)(std::int64_t steps);
  double ops_per_step;
  std::uint32_t needs;
};

constexpr Loop kLoops[] = {
    {"fma_avx2", fma_avx2, 12 * 8 * 2, kAvx2},
    {"fma_avx512", fma_avx512, 12 * 16 * 2, kAvx512},
    {"bf16_avx512", bf16_avx512, 12 * 32 * 2, kAvx512 | kAvx512Bf16},
    {"int8_avx2", int8_avx2, 8 * 4 * 32 * 2, kAvx2},
    {"int8_avxvnni", int8_avxvnni, 12 * 32 * 2, kAvx2 | kAvxVnni},
    {"int8_avx512", int8_avx512, 12 * 64 * 2, kAvx512 | kAvx512Vnni},
};

// Seconds from the moment all threads are ready to the moment the last is done.
template <class F>
double timed_region(int threads, F&& work) {
  std::vector<Clock::time_point> begin(threads), end(threads);
  int size = 1;
  parallel(threads, [&](const Team& team) {
    if (team.id == 0) size = team.size;
    team.barrier();
    begin[team.id] = Clock::now();
    work(team);
    end[team.id] = Clock::now();
  });
  const auto first = *std::min_element(begin.begin(), begin.begin() + size);
  const auto last = *std::max_element(end.begin(), end.begin() + size);
  return std::chrono::duration<double>(last - first).count();
}

}  // namespace

double measure_read_bandwidth(int threads, std::size_t bytes) {
  constexpr std::size_t kHuge = std::size_t{2} << 20;
  constexpr int kPasses = 9;
  if (threads < 1 || !(cpu_features() & kAvx2)) return 0;
  const std::size_t part = std::max<std::size_t>(bytes / threads / kHuge, 1) * kHuge;
  const std::size_t total = part * threads;
  void* map = mmap(nullptr, total + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return 0;
  char* base = reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(map) + kHuge - 1) & ~(kHuge - 1));
  madvise(base, total, MADV_HUGEPAGE);
  // Each thread writes the part that it will read, so that the memory is near it.
  std::atomic<int> ready{0};
  parallel(threads, [&](const Team& team) {
    for (int i = team.id; i < threads; i += team.size) std::memset(base + part * i, 1, part);
    ++ready;
  });
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const double seconds = timed_region(threads, [&](const Team& team) {
      for (int i = team.id; i < threads; i += team.size) read_all(base + part * i, part);
    });
    best = std::max(best, static_cast<double>(total) / seconds);
  }
  munmap(map, total + kHuge);
  return best;
}

double measure_peak(int threads, const char* name) {
  constexpr int kPasses = 9;
  constexpr double kPassSeconds = 0.02;
  const Loop* found = std::find_if(std::begin(kLoops), std::end(kLoops),
                                   [&](const Loop& loop) { return std::strcmp(loop.name, name) == 0; });
  if (found == std::end(kLoops)) return -1;
  const Loop& loop = *found;
  if (threads < 1 || (cpu_features() & loop.needs) != loop.needs) return 0;
  std::int64_t steps = 1 << 16;
  for (;;) {  // long enough that starting the threads does not count, and the clock has come up
    const auto start = Clock::now();
    loop.run(steps);
    if (seconds_since(start) > kPassSeconds) break;
    steps *= 2;
  }
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    int size = 1;
    const double seconds = timed_region(threads, [&](const Team& team) {
      if (team.id == 0) size = team.size;
      loop.run(steps);
    });
    best = std::max(best, loop.ops_per_step * static_cast<double>(steps) * size / seconds);
  }
  return best;
}

}  // namespace int4moe
