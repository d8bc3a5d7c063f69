// Work handed out in pieces that begin large and end small: long runs of memory for each thread, and little to wait for at
// the end.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace int4moe {

// A thread takes so much of what is left at a time: 1 / (kShares * threads).
constexpr int kShares = 2;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

// How many of `rest` to take, at most `most`, where `left` of that kind would be all the work that is left.
inline int fair_share(int64_t left, int rest, int most, int threads) {
  const int fair = int(std::max<int64_t>(1, std::min<int64_t>({left / (kShares * threads), most, rest})));
  return ceil_div(rest, ceil_div(rest, fair));  // no small one at the end
}

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
    const int count = fair_share(total - at, ends[part] - at, most, threads);
    if (next.compare_exchange_weak(at, at + count, std::memory_order_relaxed)) return {at, count};
  }
  return {total, 0};
}

}  // namespace int4moe
