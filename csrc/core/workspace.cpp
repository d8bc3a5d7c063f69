#include "core/workspace.h"

#include <sys/mman.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

namespace int4moe {

struct Workspace::Buffer {
  std::byte* data = nullptr;
  size_t size = 0;

  ~Buffer() { std::free(data); }

  void grow(size_t bytes) {
    constexpr size_t kHugePage = size_t(2) << 20;
    const size_t step = bytes >= kHugePage ? kHugePage : 4096;
    const size_t want = (bytes + step - 1) / step * step;
    std::free(data);
    data = nullptr;
    size = 0;
    void* fresh = nullptr;
    if (posix_memalign(&fresh, step, want)) throw std::bad_alloc();
    if (step == kHugePage) madvise(fresh, want, MADV_HUGEPAGE);
    data = static_cast<std::byte*>(fresh);
    size = want;
  }
};

namespace {

// Leaked on purpose: calls may still run while static objects are destroyed.
template <class T>
struct Shelf {
  std::mutex mutex;
  std::vector<std::unique_ptr<T>> free;
};

template <class T>
Shelf<T>& shelf() {
  static auto* s = new Shelf<T>;
  return *s;
}

}  // namespace

Workspace::Workspace() {
  auto& s = shelf<Buffer>();
  if (s.mutex.try_lock()) {  // never waits: a lock that was held during a fork stays held in the child
    if (!s.free.empty()) {
      buffer_ = std::move(s.free.back());
      s.free.pop_back();
    }
    s.mutex.unlock();
  }
  if (!buffer_) buffer_ = std::make_unique<Buffer>();
}

Workspace::~Workspace() {
  auto& s = shelf<Buffer>();
  if (!s.mutex.try_lock()) return;
  s.free.push_back(std::move(buffer_));
  s.mutex.unlock();
}

std::byte* Workspace::reserve(size_t bytes) {
  if (bytes > buffer_->size) buffer_->grow(bytes);
  return buffer_->data;
}

}  // namespace int4moe
