#include "core/threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>

#include "core/barrier.h"
#include "core/pool.h"

namespace int4moe {
namespace {

struct OpenMp {
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
};

template <class F>
void resolve(void* handle, const char* name, F& out) {
  out = reinterpret_cast<F>(dlsym(handle, name));
}

OpenMp find_openmp() {
  OpenMp omp;
#ifndef INT4MOE_STD_THREADS
  void* handle = RTLD_DEFAULT;  // which is null
  if (!dlsym(handle, "GOMP_parallel") && !(handle = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL))) return omp;
  resolve(handle, "GOMP_parallel", omp.parallel);
  resolve(handle, "omp_get_thread_num", omp.thread_num);
  resolve(handle, "omp_get_num_threads", omp.num_threads);
  if (!omp.parallel || !omp.thread_num || !omp.num_threads) return OpenMp{};
#endif
  return omp;
}

const OpenMp& openmp() {
  static const OpenMp omp = find_openmp();
  return omp;
}

struct Call {
  TeamFunction fn;
  void* arg;
  Barrier barrier;
};

void enter(void* data) {
  auto* call = static_cast<Call*>(data);
  const OpenMp& omp = openmp();
  const Team team{omp.thread_num(), omp.num_threads(), &call->barrier};
  call->fn(team, call->arg);
  // Threads meet here rather than where the runtime joins them: libgomp spins there for milliseconds and gives way to
  // nobody, which costs a time slice whenever another process has taken one thread's core.
  team.barrier();
}

void openmp_parallel(int threads, TeamFunction fn, void* arg) {
  Call call{fn, arg, {}};
  openmp().parallel(enter, &call, unsigned(threads), 0);
}

std::atomic<bool> forked{false};  // libgomp's pool hangs in a child
const int watch_forks = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

bool use_openmp() { return openmp().parallel && !forked.load(std::memory_order_relaxed); }

}  // namespace

void Team::barrier() const {
  if (size > 1) shared->wait(size);
}

void parallel(int threads, TeamFunction fn, void* arg) {
  (void)watch_forks;
  if (threads <= 1) {
    fn(Team{}, arg);
  } else if (use_openmp()) {
    openmp_parallel(threads, fn, arg);
  } else {
    pool_parallel(threads, fn, arg);
  }
}

const char* thread_runtime() { return use_openmp() ? "openmp" : "threads"; }

}  // namespace int4moe
