#include "core/attention.h"

#include <algorithm>
#include <atomic>

#include "core/cpu_features.h"
#include "core/threads.h"
#include "isa/avx2_attention.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

bool attention_available() { return cpu_features() & kAvx2; }

void attention(const AttentionArgs& a, int threads) {
  // Tokens of all heads that share keys go together; later tokens see more keys, so they go first.
  const int64_t group = a.heads / a.kv_heads, chunk = std::max<int64_t>(1, avx2::kAttentionRows / group);
  const int64_t chunks = (a.tokens + chunk - 1) / chunk, tasks = a.batch * a.kv_heads * chunks;
  std::atomic<int64_t> next{0};
  parallel(int(std::min<int64_t>(threads, tasks)), [&](const Team&) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const int64_t pair = task % (a.batch * a.kv_heads), c = chunks - 1 - task / (a.batch * a.kv_heads);
      const int64_t first = c * chunk, last = std::min(a.tokens, first + chunk);
      avx2::attend(a, pair / a.kv_heads, int(pair % a.kv_heads), first, last);
    }
  });
}

#else

bool attention_available() { return false; }
void attention(const AttentionArgs&, int) {}

#endif

}  // namespace int4moe
