#include "core/decode.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <optional>

#include "core/attention.h"
#include "core/decode_latent.h"
#include "core/decode_products.h"
#include "core/decode_router.h"
#include "core/elementwise.h"
#include "core/experts_pass.h"
#include "core/threads.h"
#include "core/workspace.h"
#include "isa/attention_kernels.h"
#include "isa/avx2_dense.h"
#include "isa/avx2_elementwise.h"
#include "isa/float_bits.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

namespace {

constexpr int kOwnRows = 2;  // sequences that every thread normalises and prepares for itself, which saves a barrier

using Clock = std::chrono::steady_clock;

class Step {
 public:
  Step(const DecodeShape& shape, const std::vector<DecodeLayer>& layers, const DecodeArgs& args, Assignments& work,
       std::vector<ExpertsItem>& items)
      : s_(shape), layers_(layers), a_(args), products_(args.rows, args.threads, shape.avx512), latent_(shape, args, products_), work_(work), items_(items) {
    for (const DecodeLayer& l : layers_) {
      for (const DecodeLinear* p : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down, &l.score, &l.latent.query}) products_.expect(*p);
      if (s_.latent.rank) latent_.expect(l);
      whole_norms_ = whole_norms_ || l.whole_norms;
      inner_ = std::max(inner_, l.up.rows);
      top_k_ = std::max(top_k_, l.top_k);
      if (l.top_k) experts_ = std::max(experts_, l.experts.layout->experts());
    }
    int64_t longest = 0;
    for (int r = 0; r < a_.rows; ++r) {
      first_run_[r + 1] = first_run_[r] + int(attention_runs(a_.lengths[r] + 1));
      longest = std::max(longest, a_.lengths[r] + 1);
    }
    run_floats_ = attention_run_floats(one_head(longest));
    scratch_floats_ = attention_scratch_floats(one_head(longest));
  }

  size_t carve(std::byte* base) {
    Carver c(base);
    const auto rows = size_t(a_.rows);
    q_ = c.take<uint16_t>(rows * size_t(s_.heads) * s_.head_dim);
    k_ = c.take<uint16_t>(rows * size_t(s_.kv_heads) * s_.head_dim);
    v_ = c.take<uint16_t>(rows * size_t(s_.kv_heads) * s_.head_dim);
    mixed_ = c.take<uint16_t>(rows * size_t(s_.heads) * (s_.latent.rank ? s_.latent.value_dim : s_.head_dim));
    attended_ = s_.latent.rank ? c.take<uint16_t>(rows * size_t(s_.heads) * s_.latent.rank) : mixed_;
    if (s_.latent.rank) latent_.carve(c);
    added_ = c.take<uint16_t>(rows * size_t(s_.hidden));
    gate_ = c.take<uint16_t>(rows * size_t(inner_));
    up_ = c.take<uint16_t>(rows * size_t(inner_));
    score_ = c.take<uint16_t>(rows);
    shared_ = c.take<uint16_t>(inner_ ? rows * size_t(s_.hidden) : 0);
    logits_ = c.take<uint16_t>(rows * size_t(experts_));
    float_logits_ = c.take<float>(rows * size_t(experts_));
    scores_ = c.take<float>(rows * size_t(top_k_));
    ids_ = c.take<int64_t>(rows * size_t(top_k_));
    counters_ = c.take<std::atomic<int>>(layers_.size() * kPhases);
    runs_left_ = c.take<std::atomic<int>>(rows * size_t(s_.kv_heads));
    results_ = c.take<float>(run_floats_ * size_t(first_run_[a_.rows]) * size_t(s_.kv_heads));
    inputs_.resize(a_.rows > kOwnRows ? 1 : size_t(a_.threads));
    for (Inputs& in : inputs_) {
      in.hidden = c.take<uint16_t>(rows * size_t(s_.hidden));
      in.normed = c.take<uint16_t>(rows * size_t(s_.hidden));
      in.router = c.take<float>(rows * dense_row_floats(s_.hidden));
      in.q = whole_norms_ ? c.take<uint16_t>(rows * size_t(s_.heads) * s_.head_dim) : nullptr;
      in.k = whole_norms_ ? c.take<uint16_t>(rows * size_t(s_.kv_heads) * s_.head_dim) : nullptr;
      if (s_.latent.rank) in.latent = latent_.carve_inputs(c);
      in.prepared = products_.carve_prepared(c);
    }
    mine_.resize(size_t(a_.threads));
    for (Mine& m : mine_) {
      products_.carve(c, m.products);
      m.query = c.take<uint16_t>(size_t(s_.heads / s_.kv_heads) * s_.head_dim);
      m.scratch = c.take<float>(scratch_floats_);
      if (s_.latent.rank) latent_.carve(c, m.latent);
    }
    return c.used();
  }

  void reset() {
    for (size_t i = 0; i < layers_.size() * kPhases; ++i) new (&counters_[i]) std::atomic<int>(0);
    for (int i = 0; i < a_.rows * s_.kv_heads; ++i) new (&runs_left_[i]) std::atomic<int>(runs_of(i / s_.kv_heads));
  }

  bool failed() const { return failed_; }

  void run(const Team& team) {
    Mine& m = mine_[size_t(team.id)];
    const bool shared = inputs_.size() < mine_.size();
    m.in = &inputs_[shared ? 0 : size_t(team.id)];
    m.products.prepared = &m.in->prepared;
    m.latent.in = &m.in->latent;
    m.products.first_row = shared ? team.id : 0;
    m.products.row_step = shared ? team.size : 1;
    each_row(m, [&](int r) { std::memcpy(hidden(m, r), a_.hidden + size_t(r) * s_.hidden, size_t(s_.hidden) * 2); });
    if (team.id == 0) last_ = Clock::now();
    for (size_t i = 0; i < layers_.size(); ++i) {
      attention_block(team, m, i);
      took(team, kAttentionPart);
      if (!mlp_block(team, m, i)) return;
      took(team, kExpertsPart);
    }
    if (!shared && team.id) return;
    each_row(m, [&](int r) { std::memcpy(a_.hidden + size_t(r) * s_.hidden, hidden(m, r), size_t(s_.hidden) * 2); });
  }

 private:
  enum Phase { kInputs, kHeads, kOutput, kInner, kDown, kLatent, kPhases = kLatent + DecodeLatent::kPhases };

  // What linears read: each thread's own, or with many sequences that of all, to which a thread brings its rows.
  struct Inputs {
    uint16_t *hidden, *normed;
    uint16_t *q, *k;  // after norms of all heads together
    float* router;  // what is normalised, as a dense router reads it
    DecodeProducts::Prepared prepared;
    DecodeLatent::Inputs latent;
  };

  struct Mine {
    uint16_t* query;
    float* scratch;
    Inputs* in;
    DecodeProducts::Mine products;
    DecodeLatent::Mine latent;
  };

  uint16_t* hidden(const Mine& m, int row) const { return m.in->hidden + size_t(row) * s_.hidden; }
  uint16_t* normed(const Mine& m, int row) const { return m.in->normed + size_t(row) * s_.hidden; }

  template <class F>
  void each_row(const Mine& m, F&& f) const {
    for (int r = m.products.first_row; r < a_.rows; r += m.products.row_step) f(r);
  }

  // Before threads read what others have brought.
  static void brought(const Team& team, const Mine& m) {
    if (m.products.row_step > 1) team.barrier();
  }

  void took(const Team& team, DecodePart part) {
    if (!a_.seconds || team.id != 0) return;
    const auto now = Clock::now();
    a_.seconds[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

  std::atomic<int>& counter(size_t layer, Phase phase) { return counters_[layer * kPhases + phase]; }

  void normalise(Mine& m, const uint16_t* weight, float eps) {
    each_row(m, [&](int r) {
      avx2::rms_norm_row(FloatType::kBFloat16, s_.hidden, hidden(m, r), weight, eps, normed(m, r));
    });
  }

  void normalise_heads(const Team& team, Mine& m, const DecodeLayer& l) {
    const int64_t wide = int64_t(s_.heads) * s_.head_dim, narrow = int64_t(s_.kv_heads) * s_.head_dim;
    each_row(m, [&](int r) {
      avx2::rms_norm_row(FloatType::kBFloat16, wide, q_ + r * wide, l.q_norm, l.head_eps, m.in->q + r * wide);
      avx2::rms_norm_row(FloatType::kBFloat16, narrow, k_ + r * narrow, l.k_norm, l.head_eps, m.in->k + r * narrow);
    });
    brought(team, m);
  }

  void add(Mine& m) {
    each_row(m, [&](int r) { avx2::add_bf16(s_.hidden, added_ + size_t(r) * s_.hidden, hidden(m, r)); });
  }

  // What experts and MLP gave, by way of `normed`, which has been read.
  void add_both(Mine& m, const DecodeLayer& l) {
    each_row(m, [&](int r) {
      const uint16_t *experts = added_ + size_t(r) * s_.hidden, *mlp = shared_ + size_t(r) * s_.hidden;
      uint16_t* sum = normed(m, r);
      if (l.score.rows) {
        avx2::add_scaled_row(FloatType::kBFloat16, s_.hidden, experts, mlp, score_ + r, sum);
      } else {
        std::memcpy(sum, experts, size_t(s_.hidden) * sizeof(uint16_t));
        avx2::add_bf16(s_.hidden, mlp, sum);
      }
      avx2::add_bf16(s_.hidden, sum, hidden(m, r));
    });
  }

  void attention_block(const Team& team, Mine& m, size_t i) {
    const DecodeLayer& l = layers_[i];
    const DecodeCache* caches = a_.caches + i * size_t(a_.rows);
    normalise(m, l.input_norm, l.eps);
    if (s_.latent.rank) {
      latent_.before(team, m.products, m.latent, l, m.in->normed, caches, &counter(i, kLatent), q_);
    } else {
      products_.multiply(team, m.products, m.in->normed, {{&l.q, &l.k, &l.v}, {q_, k_, v_}, 3}, counter(i, kInputs));
      team.barrier();
      if (l.whole_norms) normalise_heads(team, m, l);
    }
    heads(m, l, caches, counter(i, kHeads));
    team.barrier();
    if (s_.latent.rank) {
      latent_.after(m.latent, l, attended_, &counter(i, kLatent), mixed_);
      team.barrier();
    }
    products_.multiply(team, m.products, mixed_, {{&l.o}, {added_}, 1}, counter(i, kOutput));
    team.barrier();
    add(m);
  }

  int runs_of(int row) const { return first_run_[row + 1] - first_run_[row]; }

  // One sequence and one key/value head, but for where its queries, keys and values are.
  AttentionArgs one_head(int64_t keys) const {
    AttentionArgs a{};
    a.type = FloatType::kBFloat16;
    a.batch = a.tokens = a.kv_heads = 1;
    a.heads = s_.heads / s_.kv_heads;
    a.keys = keys;
    a.head_dim = s_.head_dim;
    a.value_dim = s_.latent.rank ? s_.latent.rank : s_.head_dim;
    a.avx512 = s_.avx512;
    return a;
  }

  void rotate(const DecodeLayer& l, uint16_t* x, int heads, const uint16_t* norm, int row) const {
    const int64_t at = int64_t(row % a_.cos_rows) * s_.turned;
    const auto *cos = static_cast<const uint16_t*>(a_.cos) + at, *sin = static_cast<const uint16_t*>(a_.sin) + at;
    if (l.whole_norms) norm = nullptr;
    avx2::rotate_one({FloatType::kBFloat16, 1, heads, s_.head_dim, x, cos, sin, 1, norm, l.head_eps, s_.turned}, 0);
  }

  // Rotates, extends the cache and attends. A task is one sequence, one of its key/value heads and a run of keys.
  void heads(Mine& m, const DecodeLayer& l, const DecodeCache* caches, std::atomic<int>& next) {
    const int tasks = first_run_[a_.rows] * s_.kv_heads;
    for (int task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) {
      int row = 0;
      while (task >= first_run_[row + 1] * s_.kv_heads) ++row;
      const int of_row = task - first_run_[row] * s_.kv_heads, runs = runs_of(row);
      attend(m, l, caches[row], row, of_row / runs, of_row % runs, results_ + run_floats_ * size_t(task));
    }
  }

  void attend(Mine& m, const DecodeLayer& l, const DecodeCache& c, int row, int head, int run, float* result) {
    const int group = s_.heads / s_.kv_heads, n = s_.head_dim, runs = runs_of(row), pair = row * s_.kv_heads + head;
    const int64_t first = int64_t(row) * s_.heads + int64_t(head) * group;
    AttentionArgs a = one_head(a_.lengths[row] + 1);
    if (s_.latent.rank) {
      a.q = {q_ + first * n, {0, n, 0}};
      a.k = a.v = {c.keys, {0, 0, c.key_stride[1]}};
    } else {
      turn(m, l, c, row, head, run == runs - 1);
      a.q = {m.query, {0, n, 0}};
      a.k = {c.keys + head * c.key_stride[0], {0, 0, c.key_stride[1]}};
      a.v = {c.values + head * c.value_stride[0], {0, 0, c.value_stride[1]}};
    }
    a.out = attended_ + first * a.value_dim;
    a.scale = l.scale;
    const AttentionKernels& kernels = attention_kernels(a);
    const int64_t from = run * kAttentionRun;
    kernels.attend_run(a, 0, 0, from, std::min(a.keys, from + kAttentionRun), result, m.scratch);
    if (runs_left_[pair].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    kernels.join_runs(a, 0, 0, runs, result - run_floats_ * size_t(run), m.scratch);
    runs_left_[pair].store(runs, std::memory_order_relaxed);  // for the next layer, which begins behind a barrier
  }

  // A key/value head's queries to m.query and, with the last run of keys, the new token into the cache.
  void turn(Mine& m, const DecodeLayer& l, const DecodeCache& c, int row, int head, bool last) {
    const int group = s_.heads / s_.kv_heads, n = s_.head_dim, pair = row * s_.kv_heads + head;
    const int64_t first = (int64_t(row) * s_.heads + int64_t(head) * group) * n, length = a_.lengths[row];
    uint16_t *keys = c.keys + head * c.key_stride[0], *values = c.values + head * c.value_stride[0];
    // A copy: other threads may be at other runs of the same heads.
    std::memcpy(m.query, (l.whole_norms ? m.in->q : q_) + first, size_t(group) * n * sizeof(uint16_t));
    rotate(l, m.query, group, l.q_norm, row);
    if (!last) return;
    uint16_t* key = (l.whole_norms ? m.in->k : k_) + int64_t(pair) * n;
    rotate(l, key, 1, l.k_norm, row);
    std::memcpy(keys + length * c.key_stride[1], key, size_t(n) * sizeof(uint16_t));
    std::memcpy(values + length * c.value_stride[1], v_ + int64_t(pair) * n, size_t(n) * sizeof(uint16_t));
  }

  // Experts, an MLP for all tokens, or the sum of both.
  bool mlp_block(const Team& team, Mine& m, size_t i) {
    const DecodeLayer& l = layers_[i];
    const bool mlp = l.up.rows;
    normalise(m, l.post_norm, l.eps);
    if (l.top_k) choose(team, m, l);
    if (mlp) {
      const DecodeGroup inner{{&l.gate, &l.up, &l.score}, {gate_, up_, score_}, l.score.rows ? 3 : 2};
      products_.multiply(team, m.products, m.in->normed, inner, counter(i, kInner));
    }
    team.barrier();
    if (failed_) return false;
    if (mlp) activate(team, int64_t(a_.rows) * l.up.rows);
    if (l.top_k) {
      pass_->run(team);  // its threads meet: what was activated is complete behind it
    } else {
      team.barrier();
    }
    if (mlp) products_.multiply(team, m.products, gate_, {{&l.down}, {l.top_k ? shared_ : added_}, 1}, counter(i, kDown));
    team.barrier();
    l.top_k && mlp ? add_both(m, l) : add(m);
    return true;
  }

  void choose(const Team& team, Mine& m, const DecodeLayer& l) {
    const int experts = l.experts.layout->experts();
    const int64_t first = int64_t(experts) * team.id / team.size, last = int64_t(experts) * (team.id + 1) / team.size;
    const DenseKernels& dense = dense_kernels(s_.avx512);
    const DenseWeight router{l.router, nullptr, nullptr, experts, s_.hidden};
    const size_t stride = dense_row_floats(s_.hidden);
    if (l.router) each_row(m, [&](int r) { dense.prepare(s_.hidden, normed(m, r), false, m.in->router + stride * size_t(r)); });
    brought(team, m);
    if (l.router) {
      dense.rows(router, first, last, a_.rows, m.in->router, logits_);
    } else {
      avx2::float_rows(a_.rows, first, last, experts, s_.hidden, m.in->normed, l.float_router.weight, float_logits_);
    }
    team.barrier();
    if (team.id == 0) route(l, m.in->normed, experts);
    took(team, kRouterPart);
  }

  // gate_ becomes the input of down.
  void activate(const Team& team, int64_t count) {
    const int64_t first = count * team.id / team.size, last = count * (team.id + 1) / team.size;
    avx2::gated_silu(FloatType::kBFloat16, last - first, gate_ + first, up_ + first, gate_ + first);
  }

  // By one thread while the others wait or begin with the MLP: which experts, and who does what.
  void route(const DecodeLayer& l, const uint16_t* x, int experts) {
    try {
      const Routing routing = choose_experts(l, a_.rows, {logits_, float_logits_}, {scores_, ids_});
      work_.build(routing, experts, 0, a_.rows);
      arguments_ = l.experts;
      arguments_.x = x;
      arguments_.type = FloatType::kBFloat16;
      arguments_.x_stride = arguments_.y_stride = s_.hidden;
      arguments_.y = added_;
      arguments_.threads = a_.threads;
      pass_.emplace(arguments_, work_, items_, 0, a_.rows);
      pass_->carve(pass_memory_.reserve(pass_->carve(nullptr)));
      pass_->reset();
    } catch (const std::bad_alloc&) {
      failed_ = true;
    }
  }

  const DecodeShape& s_;
  const std::vector<DecodeLayer>& layers_;
  const DecodeArgs& a_;
  DecodeProducts products_;
  DecodeLatent latent_;
  int experts_ = 0, top_k_ = 0, inner_ = 0;
  bool whole_norms_ = false;
  uint16_t *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *mixed_ = nullptr, *attended_ = nullptr, *added_ = nullptr, *logits_ = nullptr;
  uint16_t *gate_ = nullptr, *up_ = nullptr, *score_ = nullptr, *shared_ = nullptr;
  float *float_logits_ = nullptr, *scores_ = nullptr;
  int64_t* ids_ = nullptr;
  std::atomic<int> *counters_ = nullptr, *runs_left_ = nullptr;
  int first_run_[kDecodeRows + 1] = {};  // of each sequence, counted for one head
  size_t run_floats_ = 0, scratch_floats_ = 0;
  float* results_ = nullptr;
  std::vector<Inputs> inputs_;
  std::vector<Mine> mine_;
  Assignments& work_;
  std::vector<ExpertsItem>& items_;
  ExpertsArgs arguments_;
  Workspace pass_memory_;
  std::optional<ExpertsPass> pass_;
  bool failed_ = false;
  Clock::time_point last_;
};

}  // namespace

void decode_step(const DecodeShape& shape, const std::vector<DecodeLayer>& layers, const DecodeArgs& args) {
  static thread_local Assignments work;
  static thread_local std::vector<ExpertsItem> items;
  Step step(shape, layers, args, work, items);
  Workspace workspace;
  step.carve(workspace.reserve(step.carve(nullptr)));
  step.reset();
  parallel(args.threads, [&step](const Team& team) { step.run(team); });
  if (step.failed()) throw std::bad_alloc();
}

#else

void decode_step(const DecodeShape&, const std::vector<DecodeLayer>&, const DecodeArgs&) {}

#endif

}  // namespace int4moe
