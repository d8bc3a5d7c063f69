// Where the threads of a region meet.
#pragma once

#include <atomic>

#include "core/waiting.h"

namespace int4moe {

class Barrier {
 public:
  void wait(int size) {
    const unsigned phase = phase_.load();
    if (arrived_.fetch_add(1) + 1 == size) {
      arrived_.store(0);
      phase_.store(phase + 1);
      waiting_.wake();
    } else {
      waiting_.until([&] { return phase_.load() != phase; });
    }
  }

 private:
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  Waiting waiting_;
};

}  // namespace int4moe
