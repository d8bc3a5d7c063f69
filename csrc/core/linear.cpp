#include "core/linear.h"

#include <algorithm>
#include <atomic>

#include "core/shares.h"
#include "core/threads.h"
#include "core/workspace.h"

namespace int4moe {

namespace {

constexpr int kItemTokens = kMostTokens;
constexpr int kItemBlocks = 4;
constexpr int64_t kPassTokens = 2048;

// Blocks for some tokens; none where all are taken.
struct Item {
  int block, blocks, token, tokens;
};

void run_pass(const LinearArgs& a, const Matrix& m, Workspace& workspace, int64_t from, int tokens) {
  const Kernels& k = *a.kernels;
  const size_t row = k.row_bytes(m), element = a.type == FloatType::kFloat32 ? 4 : 2;
  const float* bias = a.layout->bias(a.blob, 0, kUp);
  const int32_t* perm = a.layout->perm(a.blob, 0, kUp);

  const int parts = ceil_div(tokens, kItemTokens);
  const int size = std::min(tokens, ceil_div(ceil_div(tokens, parts), k.tile) * k.tile);
  const int chunks = ceil_div(tokens, size);
  // One chunk of tokens: shares of the blocks. More: pieces of so many blocks, the chunks of one next to each other, so
  // that they find its codes in a cache.
  int blocks = std::min(chunks == 1 ? kItemTokens * kItemBlocks / size : kItemBlocks, m.blocks);
  while (chunks > 1 && blocks > 1 && ceil_div(m.blocks, blocks) * chunks < 8 * a.threads) --blocks;
  const int items = chunks == 1 ? m.blocks : ceil_div(m.blocks, blocks) * chunks;
  const int threads = std::min(a.threads, items);

  const size_t private_floats = std::max(size_t(m.columns + 15) / 16 * 16, size_t(size) * blocks * kBlockRows);
  uint8_t* prepared = nullptr;
  float* scratch = nullptr;
  const auto carve = [&](std::byte* base) {
    Carver c(base);
    prepared = c.take<uint8_t>(row * size_t(tokens));
    scratch = c.take<float>(private_floats * size_t(threads));
    return c.used();
  };
  carve(workspace.reserve(carve(nullptr)));

  std::atomic<int> next{0};
  const auto address = [&](const void* base, int64_t token, int64_t stride, int64_t column) {
    return static_cast<const uint8_t*>(base) + size_t((from + token) * stride + column) * element;
  };
  parallel(threads, [&](const Team& team) {
    float* mine = scratch + private_floats * size_t(team.id);
    for (int t = team.id; t < tokens; t += team.size) {
      k.load(a.type, address(a.x, t, a.x_stride, 0), perm, mine, size_t(m.columns));
      k.prepare(m, mine, prepared + row * size_t(t));
    }
    team.barrier();
    const auto take = [&]() -> Item {
      if (chunks == 1) {
        const Share share = take_share(next, &m.blocks, 1, threads, blocks);
        return {share.first, share.count, 0, tokens};
      }
      const int at = next.fetch_add(1, std::memory_order_relaxed), block = at / chunks * blocks, token = at % chunks * size;
      return {block, at < items ? std::min(blocks, m.blocks - block) : 0, token, std::min(size, tokens - token)};
    };
    for (Item now = take(); now.blocks;) {
      const Item after = take();
      const auto [block, n, token, count] = now;
      const int columns = n * kBlockRows, column = block * kBlockRows, valid = std::min(columns, m.rows - column);
      const Rows rows{prepared + row * size_t(token), row, nullptr, count};
      k.multiply(m, block, n, rows, mine, size_t(columns),
                 after.blocks ? m.block_codes(after.block) : nullptr);
      for (int i = 0; i < count; ++i) {
        float* out = mine + size_t(i) * columns;
        if (bias) {
          for (int j = 0; j < valid; ++j) out[j] += bias[column + j];
        }
        k.store(a.type, out, const_cast<uint8_t*>(address(a.y, token + i, a.y_stride, column)), size_t(valid));
      }
      now = after;
    }
  });
}

}  // namespace

void linear_forward(const LinearArgs& args) {
  const Matrix m = args.layout->matrix(args.blob, 0, kUp);
  Workspace workspace;
  for (int64_t from = 0; from < args.tokens; from += kPassTokens) {
    run_pass(args, m, workspace, from, int(std::min(kPassTokens, args.tokens - from)));
  }
}

}  // namespace int4moe
