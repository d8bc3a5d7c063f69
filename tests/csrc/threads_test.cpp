// Parallel regions: on every thread once, barriers between their parts, from several callers, also after threads slept.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "core/pool.h"
#include "core/threads.h"
#include "core/waiting.h"
#include "kernels_test.h"

namespace tests {

using namespace int4moe;

namespace {

constexpr int kParts = 4;

// A region whose threads write in turn what the next part reads from all of them; says whether all read the right values.
bool region(void (*run)(int, TeamFunction, void*), int threads) {
  struct State {
    std::vector<int> written;
    std::atomic<int> wrong{0}, entered{0};
  } state;
  state.written.assign(size_t(threads), -1);
  run(
      threads,
      [](const Team& team, void* arg) {
        auto& s = *static_cast<State*>(arg);
        ++s.entered;
        for (int part = 0; part < kParts; ++part) {
          s.written[size_t(team.id)] = part;
          team.barrier();
          for (int i = 0; i < team.size; ++i) s.wrong += s.written[size_t(i)] != part;
          team.barrier();
        }
      },
      &state);
  return state.wrong == 0 && state.entered == threads;
}

}  // namespace

void test_threads() {
  for (const int threads : {1, 2, 3, 5, 2}) {
    for (int i = 0; i < 20; ++i) {
      check(region(pool_parallel, threads), "a region of %d threads, time %d, of the pool", threads, i);
    }
  }
  for (int i = 0; i < 3; ++i) {
    std::this_thread::sleep_for(3 * Waiting::kSpin);
    check(region(pool_parallel, 3), "a region of 3 threads that were asleep, time %d", i);
  }
  std::vector<std::thread> callers;
  std::atomic<int> right{0};
  constexpr int kCallers = 3, kTimes = 30;
  for (int c = 0; c < kCallers; ++c) {
    callers.emplace_back([&right, c] {
      for (int i = 0; i < kTimes; ++i) right += region(pool_parallel, 2 + c);
    });
  }
  for (auto& caller : callers) caller.join();
  check(right == kCallers * kTimes, "regions of %d callers at once: %d of %d right", kCallers, right.load(), kCallers * kTimes);
}

}  // namespace tests
