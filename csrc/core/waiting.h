// Waiting for another thread: spinning while it is worth it, then asleep.
#pragma once

#include <immintrin.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace int4moe {

// A place where threads wait for something that another makes true. The condition must be read from atomics, which the
// other has written (sequentially consistent) before `wake`.
class Waiting {
 public:
  // How long a wait spins before it sleeps: waking a thread takes 10 to 50 us on virtual machines, and a decoding model
  // comes back that soon.
  static constexpr std::chrono::microseconds kSpin{300};

  template <class Condition>
  void until(Condition&& met) {
    for (int i = 0; i < kFirst; ++i) {
      if (met()) return;
      _mm_pause();
    }
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
      // Few pauses in a row: a hypervisor takes a processor away from a guest that pauses thousands of times.
      for (int i = 0; i < kPauses; ++i) {
        if (met()) return;
        _mm_pause();
      }
      std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < end);
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.fetch_add(1);
    awake_.wait(lock, met);
    asleep_.fetch_sub(1);
  }

  void wake() {
    if (asleep_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // whoever counted itself asleep has looked, and waits
    awake_.notify_all();
  }

 private:
  static constexpr int kFirst = 500, kPauses = 50;
  std::atomic<int> asleep_{0};
  std::mutex mutex_;
  std::condition_variable awake_;
};

}  // namespace int4moe
