// All of the program's C++ allocations go through here, so that they can fail on purpose.
#include "memory.h"

#include <atomic>
#include <cstdlib>
#include <deque>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "check.h"
#include "core/compact.h"
#include "core/dense.h"
#include "core/head_linear.h"
#include "core/pool.h"
#include "core/unpack.h"
#include "core/workspace.h"
#include "kernels_test.h"

namespace {

std::atomic<long> allocations_left{-1};  // negative: as many as wanted

void* allocate(std::size_t bytes, std::size_t alignment) {
  for (long left = allocations_left.load(); left >= 0;) {
    if (left == 0) throw std::bad_alloc();
    if (allocations_left.compare_exchange_weak(left, left - 1)) break;
  }
  void* p = nullptr;
  if (posix_memalign(&p, alignment, bytes ? bytes : 1)) throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return allocate(bytes, std::size_t(alignment)); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { std::free(p); }

namespace tests {

using namespace int4moe;

void test_without_memory(const char* name, const std::function<void()>& call, const std::function<bool()>& right) {
  static std::deque<Workspace> taken;  // what earlier calls have left, kept from now on
  for (long n = 0;; ++n) {
    for (int i = 0; i < 8; ++i) taken.emplace_back();
    bool failed = false, again = false;
    std::thread([&] {
      allocations_left = n;
      try {
        call();
      } catch (const std::bad_alloc&) {
        failed = true;
      }
      allocations_left = -1;
      if (!failed) return;
      call();
      again = true;
    }).join();
    check(right(), "%s: the result %s %ld allocations", name, again ? "after only" : "with", n);
    if (failed) continue;
    check(n > 0, "%s allocates memory", name);
    return;
  }
}

void test_memory() {
  Random random(5);
  constexpr int kTokens = 5, kRows = 7, kColumns = 64;
  std::vector<uint16_t> x, w, y(size_t(kTokens) * kRows);
  for (int i = 0; i < kTokens * kColumns; ++i) x.push_back(uint16_t(random.below(2) ? 0x3f80 : 0xbf80));  // 1 or -1
  for (int i = 0; i < kRows * kColumns; ++i) w.push_back(uint16_t(random.below(2) ? 0x3f80 : 0xbf80));
  const auto dense = [&](uint16_t* to) { dense_linear({w.data(), nullptr, nullptr, kRows, kColumns}, kTokens, x.data(), to, false, 2); };
  if (dense_available()) {
    std::vector<uint16_t> expected(y.size());
    dense(expected.data());
    test_without_memory("dense_linear", [&] { dense(y.data()); }, [&] { return y == expected; });
    // The same product, of a single head.
    const HeadLinear head{kTokens, 1, kRows, kColumns, x.data(), {kColumns, kColumns}, w.data(), y.data(), {kRows, kRows}};
    test_without_memory("head_linear", [&] { head_linear(head, 2); }, [&] { return y == expected; });
  }

  std::unique_ptr<Compact> compact;
  std::vector<uint16_t> back(w.size());
  test_without_memory("Compact::pack", [&] { compact = Compact::pack(w.data(), kRows, kColumns, 2); }, [&] {
    if (compact) compact->unpack(back.data());
    return compact && back == w;
  });

  std::vector<uint32_t> words;
  std::vector<int32_t> perm;
  for (int i = 0; i < kRows * kColumns / 8; ++i) words.push_back(random.next());
  for (int k = 0; k < kColumns; ++k) perm.push_back(kColumns - 1 - k);
  std::vector<uint8_t> codes(size_t(kRows) * kColumns / 2), expected(codes.size());
  const auto unpacked = [&](uint8_t* to) {
    canonical_codes(Packing::kColumns, words.data(), kRows, kColumns, perm.data(), to, 2);
  };
  unpacked(expected.data());
  test_without_memory("canonical_codes", [&] { unpacked(codes.data()); }, [&] { return codes == expected; });

  // More threads each time, so that the pool has to make some.
  int threads = 10;
  std::atomic<int> entered{0};
  const auto count = [](const Team&, void* arg) { ++*static_cast<std::atomic<int>*>(arg); };
  test_without_memory("a region of the pool", [&] { entered = 0; pool_parallel(threads, count, &entered); },
                      [&] { return entered == threads++; });
}

}  // namespace tests
