// The work of one MoE layer inside a parallel region, for those who bring the region.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "core/experts.h"
#include "core/shares.h"
#include "core/threads.h"
#include "core/workspace.h"

namespace int4moe {

// Tokens of one expert that a work item handles at once, and blocks of 16 rows for so many tokens: small enough for what
// an item writes to stay in L1/L2, large enough to reuse what it reads. With fewer tokens an item may have more blocks.
constexpr int kExpertsItemTokens = kMostTokens;
constexpr int kExpertsItemBlocks = 4;
constexpr int kExpertsDownBlocks = 8;
// Of a pass: with more, items of down do not get smaller towards the end, as each reads the rows of all tokens again.
constexpr int kExpertsFewTokens = 64;

// Fetches the scales of blocks that the next call reads: streams too short for the hardware to fetch ahead.
inline void fetch_scales(const Matrix& m, int block, int blocks) {
  const uint8_t* end = m.block_scales(block + blocks);
  for (const uint8_t* at = m.block_scales(block); at < end; at += 64) __builtin_prefetch(at, 0, 2);
}

struct ExpertsItem {
  int expert;       // number of the expert; -1 in an item of down, which has all of them
  int chunk;        // which (expert, token chunk), for counting it down
  int first, count;  // assignments
  int block, blocks;
};

// One pass of an MoE layer over some tokens: what its threads share, and the work of each. Made by one thread, run by all.
class ExpertsPass {
 public:
  ExpertsPass(const ExpertsArgs& args, const Assignments& work, std::vector<ExpertsItem>& items, int64_t from, int64_t to)
      : a_(args), k_(*args.kernels), work_(work), items_(items), from_(from), tokens_(int(to - from)) {
    const Layout& l = *a_.layout;
    up_ = l.matrix(a_.blob, 0, kUp);
    down_ = l.matrix(a_.blob, 0, kDown);
    gated_ = l.dims(kGate).present();
    if (gated_) gate_ = l.matrix(a_.blob, 0, kGate);
    permuted_ = l.dims(kUp).perm || l.dims(kGate).perm;
    // Gate reads rows of its own when they are permuted or grouped in another way than up's.
    two_inputs_ = gated_ && (!a_.one_input || gate_.group_size != up_.group_size);
    width_ = down_.blocks * kBlockRows;
    inner_ = up_.blocks * kBlockRows;
    plan_items();
  }

  size_t carve(std::byte* base) {
    Carver c(base);
    const int rows = permuted_ ? work_.count() : tokens_;
    up_row_ = k_.row_bytes(up_);
    x_up_ = c.take<uint8_t>(up_row_ * rows);
    if (two_inputs_) {
      gate_row_ = k_.row_bytes(gate_);
      x_gate_ = c.take<uint8_t>(gate_row_ * rows);
    }
    h_ = c.take<float>(size_t(work_.count()) * inner_);
    down_row_ = k_.row_bytes(down_);
    x_down_ = c.take<uint8_t>(down_row_ * work_.count());
    left_ = c.take<std::atomic<int>>(size_t(chunks_));
    const size_t staged = size_t(std::max(up_.columns, width_));
    const size_t gate_up = 2 * size_t(kExpertsItemTokens) * kExpertsItemBlocks * kBlockRows;
    const size_t down = size_t(kExpertsItemTokens + tokens_) * kExpertsDownBlocks * kBlockRows;
    private_floats_ = (staged + std::max(gate_up, down) + 15) / 16 * 16;
    private_ = c.take<float>(private_floats_ * size_t(a_.threads));
    return c.used();
  }

  int useful_threads() const {
    return std::min<int>(a_.threads, std::max<int>(gate_up_items_, int(items_.size()) - gate_up_items_));
  }

  void reset() {
    for (int i = 0; i < chunks_; ++i) new (&left_[i]) std::atomic<int>(0);
    for (int i = 0; i < gate_up_items_; ++i) left_[items_[size_t(i)].chunk].fetch_add(1, std::memory_order_relaxed);
  }

  void run(const Team& team) {
    float* mine = private_ + private_floats_ * size_t(team.id);
    prepare_inputs(team, mine);
    team.barrier();
    gate_up(mine);
    team.barrier();
    down(mine);
  }

 private:
  // Items of gate/up: (expert, token chunk, block chunk), the token chunks of one block chunk next to each other so
  // that they find its codes in a cache; then those of down. Items begin large, which reads memory in long runs and asks
  // for work seldom, and get smaller, so that threads end together.
  void plan_items() {
    items_.clear();
    chunks_ = 0;
    int64_t left = 0;  // work, in blocks by tokens; reading a block counts as two tokens
    for (const int e : work_.active) left += int64_t(up_.blocks) * (count_of(e) + 2);
    int most_tokens = 1;
    for (const int e : work_.active) {
      const int first = work_.first[size_t(e)], count = count_of(e);
      const int parts = ceil_div(count, kExpertsItemTokens);
      const int size = ceil_div(ceil_div(count, parts), k_.tile) * k_.tile;
      const int used = ceil_div(count, size), tokens = std::min(size, count);
      most_tokens = std::max(most_tokens, tokens);
      for (int b = 0, blocks; b < up_.blocks; b += blocks) {
        blocks = fair_share(left / (tokens + 2), up_.blocks - b, kExpertsItemTokens * kExpertsItemBlocks / tokens, a_.threads);
        for (int p = 0; p < used; ++p) {
          items_.push_back({e, chunks_ + p, first + p * size, std::min(size, count - p * size), b, blocks});
        }
        left -= int64_t(blocks) * (count + 2);
      }
      chunks_ += used;
    }
    gate_up_items_ = int(items_.size());
    int fixed = std::min(kExpertsDownBlocks, down_.blocks);
    while (fixed > 1 && ceil_div(down_.blocks, fixed) < 8 * a_.threads) --fixed;
    const int room = kExpertsDownBlocks * (kExpertsItemTokens + tokens_) / (most_tokens + tokens_);
    for (int b = 0, blocks; b < down_.blocks; b += blocks) {
      const int rest = down_.blocks - b;
      blocks = tokens_ > kExpertsFewTokens ? std::min(fixed, rest) : fair_share(rest, rest, room, a_.threads);
      items_.push_back({-1, 0, 0, 0, b, blocks});
    }
  }

  int count_of(int expert) const { return work_.first[size_t(expert) + 1] - work_.first[size_t(expert)]; }

  const uint8_t* token_row(int token) const {
    const size_t bytes = a_.type == FloatType::kFloat32 ? 4 : a_.type == FloatType::kFloat64 ? 8 : 2;
    return static_cast<const uint8_t*>(a_.x) + size_t((from_ + token) * a_.x_stride) * bytes;
  }

  void prepare_row(int row, int token, int expert, float* stage) const {
    const Layout& l = *a_.layout;
    k_.load(a_.type, token_row(token), permuted_ ? l.perm(a_.blob, expert, kUp) : nullptr, stage, size_t(up_.columns));
    k_.prepare(up_, stage, x_up_ + up_row_ * row);
    if (!two_inputs_) return;
    k_.load(a_.type, token_row(token), permuted_ ? l.perm(a_.blob, expert, kGate) : nullptr, stage,
            size_t(gate_.columns));
    k_.prepare(gate_, stage, x_gate_ + gate_row_ * row);
  }

  void prepare_inputs(const Team& team, float* stage) {
    if (!permuted_) {
      for (int t = team.id; t < tokens_; t += team.size) prepare_row(t, t, 0, stage);
      return;
    }
    int i = team.id;  // of all assignments, so that threads share the experts of a single token
    for (const int e : work_.active) {
      for (; i < work_.first[size_t(e) + 1]; i += team.size) prepare_row(i, work_.token[size_t(i)], e, stage);
    }
  }

  Rows input_rows(const ExpertsItem& item, const uint8_t* data, size_t stride) const {
    if (permuted_) return {data + stride * size_t(item.first), stride, nullptr, item.count};
    return {data, stride, work_.token.data() + item.first, item.count};
  }

  void gate_up(float* mine) {
    const int total = gate_up_items_;
    for (int at = next_item_.fetch_add(1, std::memory_order_relaxed); at < total;) {
      const int after = next_item_.fetch_add(1, std::memory_order_relaxed);
      gate_up_item(items_[size_t(at)], after < total ? &items_[size_t(after)] : nullptr, mine);
      at = after;
    }
  }

  void gate_up_item(const ExpertsItem& item, const ExpertsItem* after, float* mine) {
    const Layout& l = *a_.layout;
    const int columns = item.blocks * kBlockRows;
    float* up_out = mine;
    float* gate_out = mine + size_t(item.count) * columns;
    const Matrix up = l.matrix(a_.blob, item.expert, kUp);
    const Matrix then = after ? l.matrix(a_.blob, after->expert, gated_ ? kGate : kUp) : up;
    if (gated_) {
      const Matrix gate = l.matrix(a_.blob, item.expert, kGate);
      const Rows rows = two_inputs_ ? input_rows(item, x_gate_, gate_row_) : input_rows(item, x_up_, up_row_);
      fetch_scales(up, item.block, item.blocks);
      k_.multiply(gate, item.block, item.blocks, rows, gate_out, size_t(columns), up.block_codes(item.block));
      add_bias(l.bias(a_.blob, item.expert, kGate), item, gate_out);
    }
    if (after) fetch_scales(then, after->block, after->blocks);
    k_.multiply(up, item.block, item.blocks, input_rows(item, x_up_, up_row_), up_out, size_t(columns),
                after ? then.block_codes(after->block) : nullptr);
    add_bias(l.bias(a_.blob, item.expert, kUp), item, up_out);
    for (int i = 0; i < item.count; ++i) {
      const size_t at = size_t(i) * columns;
      k_.activate(a_.activation, a_.alpha, a_.limit, gated_ ? gate_out + at : nullptr, up_out + at,
                  h_ + size_t(item.first + i) * inner_ + size_t(item.block) * kBlockRows, size_t(columns));
    }
    // Whoever completes the last block of these rows turns them into the input of down.
    if (left_[item.chunk].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    for (int i = item.first; i < item.first + item.count; ++i) {
      k_.prepare(down_, h_ + size_t(i) * inner_, x_down_ + down_row_ * size_t(i));
    }
  }

  void add_bias(const float* bias, const ExpertsItem& item, float* out) const {
    if (!bias) return;
    const int from = item.block * kBlockRows, columns = item.blocks * kBlockRows;
    const int valid = std::min(columns, up_.rows - from);
    for (int i = 0; i < item.count; ++i) {
      for (int j = 0; j < valid; ++j) out[size_t(i) * columns + j] += bias[from + j];
    }
  }

  // An item of down owns some columns of y for all tokens and goes through the experts in order, so that sums have a
  // fixed order and need no locks and no second pass.
  void down(float* mine) {
    const int total = int(items_.size()) - gate_up_items_;
    const ExpertsItem* items = items_.data() + gate_up_items_;
    for (int at = next_down_.fetch_add(1, std::memory_order_relaxed); at < total;) {
      const int after = next_down_.fetch_add(1, std::memory_order_relaxed);
      down_item(items[at], after < total ? &items[after] : nullptr, mine);
      at = after;
    }
  }

  void down_item(const ExpertsItem& item, const ExpertsItem* after, float* mine) {
    const Layout& l = *a_.layout;
    const int block = item.block, blocks = item.blocks;
    const int columns = blocks * kBlockRows, valid = std::min(columns, down_.rows - block * kBlockRows);
    float* sums = mine;
    float* out = mine + size_t(tokens_) * columns;
    std::memset(sums, 0, size_t(tokens_) * columns * sizeof(float));
    for (size_t n = 0; n < work_.active.size(); ++n) {
      const int e = work_.active[n];
      const int first = work_.first[size_t(e)], count = work_.first[size_t(e) + 1] - first;
      const Matrix m = l.matrix(a_.blob, e, kDown);
      const float* bias = l.bias(a_.blob, e, kDown);
      if (bias) bias += block * kBlockRows;
      const uint8_t* next = nullptr;
      if (n + 1 < work_.active.size()) {
        const Matrix then = l.matrix(a_.blob, work_.active[n + 1], kDown);
        fetch_scales(then, block, blocks);
        next = then.block_codes(block);
      } else if (after) {
        next = l.matrix(a_.blob, work_.active[0], kDown).block_codes(after->block);
      }
      for (int i = 0; i < count; i += kExpertsItemTokens) {
        const int part = std::min(kExpertsItemTokens, count - i);
        const Rows rows{x_down_ + down_row_ * size_t(first + i), down_row_, nullptr, part};
        k_.multiply(m, block, blocks, rows, out, size_t(columns), next);
        for (int j = 0; j < part; ++j) {
          const auto assignment = size_t(first + i + j);
          k_.accumulate(work_.weight[assignment], out + size_t(j) * columns, bias,
                        sums + size_t(work_.token[assignment]) * columns, size_t(valid));
        }
      }
    }
    const size_t bytes = a_.type == FloatType::kFloat32 ? 4 : 2;
    for (int t = 0; t < tokens_; ++t) {
      auto* y = static_cast<uint8_t*>(a_.y) + size_t((from_ + t) * a_.y_stride + block * kBlockRows) * bytes;
      k_.store(a_.type, sums + size_t(t) * columns, y, size_t(valid));
    }
  }

  const ExpertsArgs& a_;
  const Kernels& k_;
  const Assignments& work_;
  std::vector<ExpertsItem>& items_;
  int64_t from_;
  int tokens_;
  Matrix gate_, up_, down_;  // of expert 0, for shapes
  bool gated_ = false, permuted_ = false, two_inputs_ = false;
  int width_ = 0, inner_ = 0;
  int chunks_ = 0, gate_up_items_ = 0;
  size_t up_row_ = 0, gate_row_ = 0, down_row_ = 0, private_floats_ = 0;
  uint8_t *x_up_ = nullptr, *x_gate_ = nullptr, *x_down_ = nullptr;
  float *h_ = nullptr, *private_ = nullptr;
  std::atomic<int>* left_ = nullptr;
  alignas(64) std::atomic<int> next_item_{0};
  alignas(64) std::atomic<int> next_down_{0};
};

}  // namespace int4moe
