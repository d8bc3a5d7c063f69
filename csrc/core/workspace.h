// Scratch memory that calls borrow and give back, so that the steady state allocates nothing.
#pragma once

#include <cstddef>
#include <memory>

namespace int4moe {

class Workspace {
 public:
  Workspace();
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  // At least `bytes` bytes, 64-byte aligned, on huge pages where it is large; contents undefined. Throws std::bad_alloc.
  std::byte* reserve(size_t bytes);

 private:
  struct Buffer;
  std::unique_ptr<Buffer> buffer_;
};

// Cuts a reserved buffer into aligned arrays: first pass with null counts the bytes, second pass gives pointers.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(size_t count) {
    T* at = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return at;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace int4moe
