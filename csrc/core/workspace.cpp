#include "core/workspace.h"

#include <sys/mman.h>

#include <mutex>
#include <new>

namespace int4moe {

struct Workspace::Buffer {
  std::byte* data = nullptr;
  size_t size = 0, alignment = 1;
  std::unique_ptr<Buffer> below;  // on the shelf

  ~Buffer() { give_back(); }

  void give_back() {
    ::operator delete(data, std::align_val_t(alignment));
    data = nullptr;
    size = 0;
  }

  void grow(size_t bytes) {
    constexpr size_t kHugePage = size_t(2) << 20;
    const size_t step = bytes >= kHugePage ? kHugePage : 4096;
    const size_t want = (bytes + step - 1) / step * step;
    give_back();
    data = static_cast<std::byte*>(::operator new(want, std::align_val_t(step)));
    size = want;
    alignment = step;
    if (step == kHugePage) madvise(data, want, MADV_HUGEPAGE);
  }
};

namespace {

// Leaked on purpose: calls may still run while static objects are destroyed.
template <class T>
struct Shelf {
  std::mutex mutex;
  std::unique_ptr<T> top;
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
    if (s.top) {
      buffer_ = std::move(s.top);
      s.top = std::move(buffer_->below);
    }
    s.mutex.unlock();
  }
  if (!buffer_) buffer_ = std::make_unique<Buffer>();
}

Workspace::~Workspace() {
  auto& s = shelf<Buffer>();
  if (!s.mutex.try_lock()) return;
  buffer_->below = std::move(s.top);
  s.top = std::move(buffer_);
  s.mutex.unlock();
}

std::byte* Workspace::reserve(size_t bytes) {
  if (bytes > buffer_->size) buffer_->grow(bytes);
  return buffer_->data;
}

}  // namespace int4moe
