// Counting checks of the C++ test program. A failed check prints one line and the run goes on.
#pragma once

#include <cstdint>
#include <cstdio>

namespace tests {

struct Counts {
  long checks = 0, failures = 0;
};

inline Counts& counts() {
  static Counts c;
  return c;
}

// One check; `what` is a printf format that says what was expected of which case. At most 40 failures are printed.
template <class... Args>
bool check(bool ok, const char* what, Args... args) {
  Counts& c = counts();
  ++c.checks;
  if (!ok && ++c.failures <= 40) {
    std::printf("FAILED: ");
    std::printf(what, args...);
    std::printf("\n");
  }
  return ok;
}

// A small deterministic generator (xorshift), so that every machine and C++ library sees the same numbers.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ull + 1) {}

  uint32_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return uint32_t(state_ >> 32);
  }
  int below(int n) { return int(next() % uint32_t(n)); }
  float unit() { return float(next() >> 8) * (1.0f / (1 << 24)); }           // 0 <= v < 1
  float normal() { return (unit() + unit() + unit() + unit() - 2.0f) * 1.73f; }  // about N(0, 1)

 private:
  uint64_t state_;
};

}  // namespace tests
