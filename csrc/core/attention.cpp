#include "core/attention.h"

#include <algorithm>
#include <atomic>
#include <new>

#include "core/cpu_features.h"
#include "core/threads.h"
#include "core/workspace.h"
#include "isa/attention_kernels.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

const AttentionKernels& attention_kernels(const AttentionArgs& a) {
#ifdef INT4MOE_HAVE_AVX512
  if (a.avx512 && (cpu_features() & kAvx512) && a.head_dim % 32 == 0 && a.value_dim % 32 == 0) return kAvx512Attention;
#endif
  return kAvx2Attention;
}

namespace {

// Whoever computes the last run of a key/value head joins all of them.
void one_token(const AttentionArgs& a, int threads) {
  const int64_t runs = attention_runs(a.keys), pairs = a.batch * a.kv_heads, tasks = pairs * runs;
  threads = int(std::min<int64_t>(threads, tasks));
  const AttentionKernels& kernels = attention_kernels(a);
  const size_t result = attention_run_floats(a), own = attention_scratch_floats(a);
  Workspace workspace;
  const auto carve = [&](std::byte* base, float*& results, float*& scratch, std::atomic<int64_t>*& left) {
    Carver c(base);
    results = c.take<float>(result * size_t(tasks));
    scratch = c.take<float>(own * size_t(threads));
    left = c.take<std::atomic<int64_t>>(size_t(pairs));
    return c.used();
  };
  float *results, *scratch;
  std::atomic<int64_t>* left;
  carve(workspace.reserve(carve(nullptr, results, scratch, left)), results, scratch, left);
  for (int64_t i = 0; i < pairs; ++i) new (&left[i]) std::atomic<int64_t>(runs);
  std::atomic<int64_t> next{0};
  parallel(threads, [&](const Team& team) {
    float* mine = scratch + own * size_t(team.id);
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const int64_t pair = task / runs, from = task % runs * kAttentionRun, batch = pair / a.kv_heads;
      const int head = int(pair % a.kv_heads);
      kernels.attend_run(a, batch, head, from, std::min(a.keys, from + kAttentionRun), results + result * size_t(task), mine);
      if (left[pair].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      kernels.join_runs(a, batch, head, runs, results + result * size_t(pair * runs), mine);
    }
  });
}

}  // namespace

bool attention_available() { return cpu_features() & kAvx2; }

void attention(const AttentionArgs& a, int threads) {
  if (a.tokens == 1 && a.head_dim % 16 == 0) return one_token(a, threads);
  // Tokens of all heads that share keys go together; later tokens see more keys, so they go first.
  const int64_t group = a.heads / a.kv_heads, chunk = std::max<int64_t>(1, kAttentionRows / group);
  const int64_t chunks = (a.tokens + chunk - 1) / chunk, tasks = a.batch * a.kv_heads * chunks;
  const AttentionKernels& kernels = attention_kernels(a);
  threads = int(std::min<int64_t>(threads, tasks));
  const size_t own = attention_rows_floats(a, std::min(chunk, a.tokens) * group);
  Workspace workspace;
  auto* scratch = reinterpret_cast<float*>(workspace.reserve(own * size_t(threads) * sizeof(float)));
  std::atomic<int64_t> next{0};
  parallel(threads, [&](const Team& team) {
    for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      const int64_t pair = task % (a.batch * a.kv_heads), c = chunks - 1 - task / (a.batch * a.kv_heads);
      const int64_t first = c * chunk, last = std::min(a.tokens, first + chunk);
      kernels.attend(a, pair / a.kv_heads, int(pair % a.kv_heads), first, last,
                     scratch + own * size_t(team.id));
    }
  });
}

#else

bool attention_available() { return false; }
void attention(const AttentionArgs&, int) {}

#endif

}  // namespace int4moe
