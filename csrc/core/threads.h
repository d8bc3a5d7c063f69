// One parallel region on the OpenMP pool that torch uses, found in the process at run time (GOMP_parallel is exported
// by libgomp, and by LLVM's and Intel's runtimes too). Without one, and in a forked child (where libgomp's pool hangs),
// threads of our own (core/pool.h).
#pragma once

#include <type_traits>

namespace int4moe {

class Barrier;

// What a thread knows inside a region.
struct Team {
  int id = 0;
  int size = 1;
  Barrier* shared = nullptr;

  void barrier() const;
};

using TeamFunction = void (*)(const Team&, void*);

// Runs fn on up to `threads` threads at once (fewer when the runtime gives fewer) and returns when all are done.
// fn must not throw.
void parallel(int threads, TeamFunction fn, void* arg);

template <class F>
void parallel(int threads, F&& fn) {
  using Fn = std::remove_reference_t<F>;
  parallel(threads, [](const Team& team, void* arg) { (*static_cast<Fn*>(arg))(team); }, const_cast<void*>(static_cast<const void*>(&fn)));
}

// "openmp" or "threads": what parallel() runs on in this process now.
const char* thread_runtime();

}  // namespace int4moe
