#include "core/decode.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <optional>

#include "core/attention.h"
#include "core/elementwise.h"
#include "core/experts_pass.h"
#include "core/routing.h"
#include "core/threads.h"
#include "core/workspace.h"
#include "isa/attention_kernels.h"
#include "isa/avx2_dense.h"
#include "isa/avx2_elementwise.h"
#include "isa/float_bits.h"

namespace int4moe {

#ifdef INT4MOE_HAVE_AVX2

namespace {

constexpr int kMostBlocks = 64;  // of 16 rows, that a thread takes at once, for up to
constexpr int kItemRows = 8;     // sequences; fewer for more
constexpr int kOwnRows = 2;      // sequences that every thread normalises and prepares for itself, which saves a barrier
constexpr int kProjectionsTogether = 3;

using Clock = std::chrono::steady_clock;

// Outputs of up to three linears over one input, each dense [rows][its rows].
struct Group {
  const DecodeLinear* linear[kProjectionsTogether];
  uint16_t* out[kProjectionsTogether];
  int count;
};

class Step {
 public:
  Step(const DecodeShape& shape, const std::vector<DecodeLayer>& layers, const DecodeArgs& args, Assignments& work,
       std::vector<ExpertsItem>& items)
      : s_(shape), layers_(layers), a_(args), work_(work), items_(items) {
    for (const DecodeLayer& l : layers_) {
      for (const DecodeLinear* p : {&l.q, &l.k, &l.v, &l.o}) {
        columns_ = std::max(columns_, p->columns);
        const size_t bytes = p->layout ? p->kernels->row_bytes(matrix(*p)) : size_t(p->columns) * sizeof(float);
        prepared_bytes_ = std::max(prepared_bytes_, (bytes * size_t(a_.rows) + 63) / 64 * 64);
      }
      whole_norms_ = whole_norms_ || l.whole_norms;
      experts_ = std::max(experts_, l.experts.layout->experts());
      top_k_ = std::max(top_k_, l.top_k);
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
    mixed_ = c.take<uint16_t>(rows * size_t(s_.heads) * s_.head_dim);
    added_ = c.take<uint16_t>(rows * size_t(s_.hidden));
    logits_ = c.take<uint16_t>(rows * size_t(experts_));
    scores_ = c.take<float>(rows * size_t(top_k_));
    ids_ = c.take<int64_t>(rows * size_t(top_k_));
    counters_ = c.take<std::atomic<int>>(layers_.size() * kPhases);
    runs_left_ = c.take<std::atomic<int>>(rows * size_t(s_.kv_heads));
    results_ = c.take<float>(run_floats_ * size_t(first_run_[a_.rows]) * size_t(s_.kv_heads));
    inputs_.resize(a_.rows > kOwnRows ? 1 : size_t(a_.threads));
    for (Inputs& in : inputs_) {
      in.hidden = c.take<uint16_t>(rows * size_t(s_.hidden));
      in.normed = c.take<uint16_t>(rows * size_t(s_.hidden));
      in.wide = c.take<float>(rows * size_t(s_.hidden));
      in.q = whole_norms_ ? c.take<uint16_t>(rows * size_t(s_.heads) * s_.head_dim) : nullptr;
      in.k = whole_norms_ ? c.take<uint16_t>(rows * size_t(s_.kv_heads) * s_.head_dim) : nullptr;
      for (uint8_t*& p : in.prepared) p = c.take<uint8_t>(prepared_bytes_);
    }
    mine_.resize(size_t(a_.threads));
    for (Mine& m : mine_) {
      m.stage = c.take<float>(size_t(columns_) + 16);
      m.query = c.take<uint16_t>(size_t(s_.heads / s_.kv_heads) * s_.head_dim);
      m.scratch = c.take<float>(scratch_floats_);
      m.out = c.take<float>(rows * kMostBlocks * kBlockRows);
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
    m.first_row = shared ? team.id : 0;
    m.row_step = shared ? team.size : 1;
    each_row(m, [&](int r) { std::memcpy(hidden(m, r), a_.hidden + size_t(r) * s_.hidden, size_t(s_.hidden) * 2); });
    if (team.id == 0) last_ = Clock::now();
    for (size_t i = 0; i < layers_.size(); ++i) {
      attention_block(team, m, i);
      took(team, kAttentionPart);
      if (!experts_block(team, m, i)) return;
      took(team, kExpertsPart);
    }
    if (!shared && team.id) return;
    each_row(m, [&](int r) { std::memcpy(a_.hidden + size_t(r) * s_.hidden, hidden(m, r), size_t(s_.hidden) * 2); });
  }

 private:
  enum Phase { kInputs, kHeads, kOutput, kPhases };

  // What linears read: each thread's own, or with many sequences that of all, to which a thread brings its rows.
  struct Inputs {
    uint16_t *hidden, *normed;
    uint16_t *q, *k;  // after norms of all heads together
    float* wide;  // what is normalised for the router
    uint8_t* prepared[kProjectionsTogether];
  };

  struct Mine {
    uint16_t* query;
    float *stage, *out, *scratch;
    Inputs* in;
    int first_row, row_step;  // of the rows that this thread keeps up
  };

  uint16_t* hidden(const Mine& m, int row) const { return m.in->hidden + size_t(row) * s_.hidden; }
  uint16_t* normed(const Mine& m, int row) const { return m.in->normed + size_t(row) * s_.hidden; }

  template <class F>
  void each_row(const Mine& m, F&& f) const {
    for (int r = m.first_row; r < a_.rows; r += m.row_step) f(r);
  }

  // Before threads read what others have brought.
  static void brought(const Team& team, const Mine& m) {
    if (m.row_step > 1) team.barrier();
  }

  void took(const Team& team, DecodePart part) {
    if (!a_.seconds || team.id != 0) return;
    const auto now = Clock::now();
    a_.seconds[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

  static Matrix matrix(const DecodeLinear& p) { return p.layout->matrix(p.blob, 0, kUp); }

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

  void attention_block(const Team& team, Mine& m, size_t i) {
    const DecodeLayer& l = layers_[i];
    normalise(m, l.input_norm, l.eps);
    multiply(team, m, m.in->normed, {{&l.q, &l.k, &l.v}, {q_, k_, v_}, 3}, counter(i, kInputs));
    team.barrier();
    if (l.whole_norms) normalise_heads(team, m, l);
    heads(m, l, a_.caches + i * size_t(a_.rows), counter(i, kHeads));
    team.barrier();
    multiply(team, m, mixed_, {{&l.o}, {added_}, 1}, counter(i, kOutput));
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
    a.head_dim = a.value_dim = s_.head_dim;
    a.avx512 = s_.avx512;
    return a;
  }

  void rotate(const DecodeLayer& l, uint16_t* x, int heads, const uint16_t* norm, int row) const {
    const int64_t at = int64_t(row % a_.cos_rows) * s_.head_dim;
    if (l.whole_norms) norm = nullptr;
    avx2::rotate_one({FloatType::kBFloat16, 1, heads, s_.head_dim, x, a_.cos + at, a_.sin + at, 1, norm, l.head_eps}, 0);
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
    const int64_t first = (int64_t(row) * s_.heads + int64_t(head) * group) * n, length = a_.lengths[row];
    uint16_t *keys = c.keys + head * c.key_stride[0], *values = c.values + head * c.value_stride[0];
    // A copy: other threads may be at other runs of the same heads.
    std::memcpy(m.query, (l.whole_norms ? m.in->q : q_) + first, size_t(group) * n * sizeof(uint16_t));
    rotate(l, m.query, group, l.q_norm, row);
    if (run == runs - 1) {  // the new key is in it
      uint16_t* key = (l.whole_norms ? m.in->k : k_) + int64_t(pair) * n;
      rotate(l, key, 1, l.k_norm, row);
      std::memcpy(keys + length * c.key_stride[1], key, size_t(n) * sizeof(uint16_t));
      std::memcpy(values + length * c.value_stride[1], v_ + int64_t(pair) * n, size_t(n) * sizeof(uint16_t));
    }
    AttentionArgs a = one_head(length + 1);
    a.q = {m.query, {0, n, 0}};
    a.k = {keys, {0, 0, c.key_stride[1]}};
    a.v = {values, {0, 0, c.value_stride[1]}};
    a.out = mixed_ + first;
    a.scale = l.scale;
    const AttentionKernels& kernels = attention_kernels(a);
    const int64_t from = run * kAttentionRun;
    kernels.attend_run(a, 0, 0, from, std::min(a.keys, from + kAttentionRun), result, m.scratch);
    if (runs_left_[pair].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    kernels.join_runs(a, 0, 0, runs, result - run_floats_ * size_t(run), m.scratch);
    runs_left_[pair].store(runs, std::memory_order_relaxed);  // for the next layer, which begins behind a barrier
  }

  void prepare(Mine& m, const DecodeLinear& p, const uint16_t* x, uint8_t* prepared) {
    if (!p.layout) {
      auto* wide = reinterpret_cast<float*>(prepared);
      each_row(m, [&](int r) { avx2::widen(p.columns, x + size_t(r) * p.columns, wide + size_t(r) * p.columns); });
      return;
    }
    const Matrix w = matrix(p);
    const size_t bytes = p.kernels->row_bytes(w);
    const int32_t* perm = p.layout->perm(p.blob, 0, kUp);
    each_row(m, [&](int r) {
      p.kernels->load(FloatType::kBFloat16, x + size_t(r) * p.columns, perm, m.stage, size_t(p.columns));
      p.kernels->prepare(w, m.stage, prepared + bytes * size_t(r));
    });
  }

  // Whether b reads what `prepare` wrote for a.
  static bool same_input(const DecodeLinear& a, const DecodeLinear& b) {
    if (!a.layout || !b.layout) return !a.layout && !b.layout;
    return a.kernels == b.kernels && matrix(a).group_size == matrix(b).group_size && !a.layout->perm(a.blob, 0, kUp) &&
           !b.layout->perm(b.blob, 0, kUp);
  }

  void multiply(const Team& team, Mine& m, const uint16_t* x, const Group& g, std::atomic<int>& next) {
    const uint8_t* prepared[kProjectionsTogether] = {};
    int ends[kProjectionsTogether];
    for (int i = 0, end = 0; i < g.count; ++i) {
      for (int j = 0; j < i && !prepared[i]; ++j) {
        if (same_input(*g.linear[j], *g.linear[i])) prepared[i] = prepared[j];
      }
      if (!prepared[i]) {
        prepare(m, *g.linear[i], x, m.in->prepared[i]);
        prepared[i] = m.in->prepared[i];
      }
      ends[i] = end += ceil_div(g.linear[i]->rows, kBlockRows);
    }
    brought(team, m);
    const auto part = [&](const Share& share) {
      int i = 0;
      while (share.first >= ends[i]) ++i;
      return i;
    };
    const auto codes = [&](const Share& share) -> const uint8_t* {
      if (!share.count) return nullptr;
      const int i = part(share);
      return g.linear[i]->layout ? matrix(*g.linear[i]).block_codes(share.first - (i ? ends[i - 1] : 0)) : nullptr;
    };
    const int most = kMostBlocks * kItemRows / std::max(kItemRows, a_.rows);
    const auto take = [&] { return take_share(next, ends, g.count, a_.threads, most); };
    for (Share now = take(); now.count;) {
      const Share after = take();
      const int i = part(now);
      item(m, *g.linear[i], now.first - (i ? ends[i - 1] : 0), now.count, prepared[i], g.out[i], codes(after));
      now = after;
    }
  }

  void item(Mine& m, const DecodeLinear& p, int first, int blocks, const uint8_t* prepared, uint16_t* y, const uint8_t* next) {
    const int column = first * kBlockRows, width = blocks * kBlockRows, valid = std::min(width, p.rows - column);
    if (!p.layout) {
      dense(p.dense, p.bias, p.rows, p.columns, column, column + valid, reinterpret_cast<const float*>(prepared), y);
      return;
    }
    const Matrix w = matrix(p);
    const Rows rows{prepared, p.kernels->row_bytes(w), nullptr, a_.rows};
    p.kernels->multiply(w, first, blocks, rows, m.out, size_t(width), next);
    const float* bias = p.layout->bias(p.blob, 0, kUp);
    for (int r = 0; r < a_.rows; ++r) {
      float* out = m.out + size_t(r) * width;
      if (bias) {
        for (int j = 0; j < valid; ++j) out[j] += bias[column + j];
      }
      p.kernels->store(FloatType::kBFloat16, out, y + size_t(r) * p.rows + column, size_t(valid));
    }
  }

  void dense(const uint16_t* w, const uint16_t* bias, int64_t rows, int64_t columns, int64_t first, int64_t last,
             const float* wide, uint16_t* y) {
    for (int from = 0; from < a_.rows; from += avx2::kDenseTile) {
      const int n = std::min(avx2::kDenseTile, a_.rows - from);
      avx2::dense_rows(n, first, last, rows, columns, wide + from * columns, w, bias, y + from * rows);
    }
  }

  bool experts_block(const Team& team, Mine& m, size_t i) {
    const DecodeLayer& l = layers_[i];
    const int experts = l.experts.layout->experts();
    normalise(m, l.post_norm, l.eps);
    each_row(m, [&](int r) { avx2::widen(s_.hidden, normed(m, r), m.in->wide + size_t(r) * s_.hidden); });
    brought(team, m);
    dense(l.router, nullptr, experts, s_.hidden, int64_t(experts) * team.id / team.size,
          int64_t(experts) * (team.id + 1) / team.size, m.in->wide, logits_);
    team.barrier();
    if (team.id == 0) route(l, m.in->normed, experts);
    team.barrier();
    if (failed_) return false;
    took(team, kRouterPart);
    pass_->run(team);
    team.barrier();
    add(m);
    return true;
  }

  // By one thread while the others wait: which experts, and who does what.
  void route(const DecodeLayer& l, const uint16_t* x, int experts) {
    try {
      const TopK top{FloatType::kBFloat16, a_.rows, experts, l.top_k, logits_, l.normalise, l.score_type, scores_, ids_};
      for (int r = 0; r < a_.rows; ++r) avx2::top_k_one(top, r);
      Routing routing;
      routing.ids = ids_;
      routing.id_stride[0] = routing.weight_stride[0] = l.top_k;
      routing.id_stride[1] = routing.weight_stride[1] = 1;
      routing.weights = scores_;
      routing.weight_type = l.score_type;
      routing.tokens = a_.rows;
      routing.top_k = l.top_k;
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
  int columns_ = 0, experts_ = 0, top_k_ = 0;
  bool whole_norms_ = false;
  size_t prepared_bytes_ = 0;
  uint16_t *q_ = nullptr, *k_ = nullptr, *v_ = nullptr, *mixed_ = nullptr, *added_ = nullptr, *logits_ = nullptr;
  float* scores_ = nullptr;
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
