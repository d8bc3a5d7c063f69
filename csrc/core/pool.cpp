#include "core/pool.h"

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "core/barrier.h"
#include "core/waiting.h"

namespace int4moe {
namespace {

class Pool {
 public:
  void run(int threads, TeamFunction fn, void* arg) {
    std::lock_guard<std::mutex> one(region_);
    while (int(workers_.size()) < threads - 1) {
      auto worker = std::make_unique<Worker>();
      workers_.reserve(workers_.size() + 1);
      std::thread([this, at = worker.get()] { serve(*at); }).detach();
      workers_.push_back(std::move(worker));  // only once it has a thread, which may be refused
    }
    Barrier barrier;
    left_.store(threads - 1);
    for (int id = 1; id < threads; ++id) {
      Worker& worker = *workers_[size_t(id - 1)];
      worker.fn = fn;
      worker.arg = arg;
      worker.team = Team{id, threads, &barrier};
      worker.calls.fetch_add(1);
      worker.called.wake();
    }
    fn(Team{0, threads, &barrier}, arg);
    done_.until([this] { return left_.load() == 0; });
  }

 private:
  struct alignas(64) Worker {
    std::atomic<unsigned> calls{0};
    TeamFunction fn = nullptr;
    void* arg = nullptr;
    Team team;
    Waiting called;
  };

  void serve(Worker& worker) {
    for (unsigned seen = 0;; ++seen) {
      worker.called.until([&] { return worker.calls.load() != seen; });
      worker.fn(worker.team, worker.arg);
      if (left_.fetch_sub(1) == 1) done_.wake();
    }
  }

  std::mutex region_;
  std::vector<std::unique_ptr<Worker>> workers_;
  alignas(64) std::atomic<int> left_{0};
  Waiting done_;
};

// Never destroyed: its threads may outlive static destructors. A forked child makes its own: the threads did not come
// along, and the object is left to the dead parent's image.
std::atomic<Pool*> current{nullptr};

const int watch_forks = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });

Pool& pool() {
  Pool* p = current.load();
  if (p) return *p;
  auto* fresh = new Pool;
  if (current.compare_exchange_strong(p, fresh)) return *fresh;
  delete fresh;
  return *p;
}

}  // namespace

void pool_parallel(int threads, TeamFunction fn, void* arg) {
  (void)watch_forks;
  pool().run(threads, fn, arg);
}

}  // namespace int4moe
