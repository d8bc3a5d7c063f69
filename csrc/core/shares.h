// Work handed out in pieces that begin large and end small: long runs of memory for each thread, and little to wait for at
// the end.
#pragma once

#include <algorithm>
#include <atomic>

namespace int4moe {

// A thread takes so much of what is left at a time: 1 / (kShares * threads).
constexpr int kShares = 2;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// [first, first + count); nothing is left where count is 0.
struct Share {
  int first = 0, count = 0;
};

// The next share of 0 .. total, at most `most` and not beyond the end of [.., end) that it begins in (`ends`, ascending,
// the last of them total).
inline Share take_share(std::atomic<int>& next, const int* ends, int parts, int threads, int most) {
  const int total = ends[parts - 1];
  for (int at = next.load(std::memory_order_relaxed); at < total;) {
    int part = 0;
    while (at >= ends[part]) ++part;
    const int rest = ends[part] - at, fair = std::max(1, std::min({(total - at) / (kShares * threads), most, rest}));
    const int count = ceil_div(rest, ceil_div(rest, fair));  // no small one at the end of a part
    if (next.compare_exchange_weak(at, at + count, std::memory_order_relaxed)) return {at, count};
  }
  return {total, 0};
}

}  // namespace int4moe
