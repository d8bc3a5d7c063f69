#include "core/threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace int4moe {

// Spins briefly, then gives way to others, then sleeps. Pauses are few: a hypervisor takes a processor away from a guest
// that pauses thousands of times in a row.
class Barrier {
 public:
  void wait(int size) {
    const unsigned phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      {
        std::lock_guard<std::mutex> lock(mutex_);
        phase_.store(phase + 1, std::memory_order_release);
      }
      wake_.notify_all();
      return;
    }
    for (int spin = 0; spin < kSpins; ++spin) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      __builtin_ia32_pause();
    }
    for (int i = 0; i < kYields; ++i) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      std::this_thread::yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, [&] { return phase_.load(std::memory_order_acquire) != phase; });
  }

 private:
  static constexpr int kSpins = 2000, kYields = 200;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
};

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
  void* handle = RTLD_DEFAULT;
  if (!dlsym(handle, "GOMP_parallel")) handle = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!handle) return omp;
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

// Threads that stay for the life of the process. One region at a time; a second caller waits.
class Pool {
 public:
  void run(int threads, TeamFunction fn, void* arg) {
    std::lock_guard<std::mutex> one(region_);
    while (int(workers_.size()) < threads - 1) {
      const int id = int(workers_.size()) + 1;
      workers_.emplace_back([this, id, seen = generation_] { work(id, seen); });
    }
    Barrier barrier;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      fn_ = fn;
      arg_ = arg;
      size_ = threads;
      barrier_ = &barrier;
      left_ = threads - 1;
      ++generation_;
    }
    start_.notify_all();
    fn(Team{0, threads, &barrier}, arg);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return left_ == 0; });
  }

 private:
  void work(int id, unsigned seen) {
    for (;;) {
      Team team;
      TeamFunction fn;
      void* arg;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        start_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        if (id >= size_) continue;
        team = Team{id, size_, barrier_};
        fn = fn_;
        arg = arg_;
      }
      fn(team, arg);
      std::lock_guard<std::mutex> lock(mutex_);
      if (--left_ == 0) done_.notify_all();
    }
  }

  std::mutex region_, mutex_;
  std::condition_variable start_, done_;
  std::vector<std::thread> workers_;
  TeamFunction fn_ = nullptr;
  void* arg_ = nullptr;
  int size_ = 0, left_ = 0;
  unsigned generation_ = 0;
  Barrier* barrier_ = nullptr;
};

std::atomic<bool> forked{false};
std::atomic<Pool*> own_pool{nullptr};

void in_child() {
  forked.store(true);
  own_pool.store(nullptr);  // its threads did not come along; the object is left to the dead parent's image
}

// Never destroyed: its threads may outlive static destructors.
Pool& pool() {
  Pool* p = own_pool.load();
  if (p) return *p;
  auto* fresh = new Pool;
  if (own_pool.compare_exchange_strong(p, fresh)) return *fresh;
  delete fresh;
  return *p;
}

struct Call {
  TeamFunction fn;
  void* arg;
  Barrier barrier;
};

void enter(void* data) {
  auto* call = static_cast<Call*>(data);
  const OpenMp& omp = openmp();
  call->fn(Team{omp.thread_num(), omp.num_threads(), &call->barrier}, call->arg);
}

const int watch_forks = pthread_atfork(nullptr, nullptr, in_child);

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
    Call call{fn, arg, {}};
    openmp().parallel(enter, &call, unsigned(threads), 0);
  } else {
    pool().run(threads, fn, arg);
  }
}

const char* thread_runtime() { return use_openmp() ? "openmp" : "threads"; }

}  // namespace int4moe
