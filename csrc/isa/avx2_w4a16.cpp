// W4A16 on AVX2: float32 arithmetic on int4 codes.
//
// A code is not shifted to the low bits: masked where it stands in its lane and converted, it is code * 2^(4n) for
// nibble n, exactly, and `prepare` has multiplied the activation by 2^(-4n). (The top nibble would come out negative;
// that one is shifted.) Order of arithmetic for one (row, token), the same for every tile size: within a group one
// chain of fused multiply-adds from -zero * (sum of the group's x), line by line, nibble 0 to 7; then one fused
// multiply-add of the group's scale into the total, group by group.
#include <cstring>

#include "core/cpu_features.h"
#include "isa/avx2_common.h"

namespace int4moe {
namespace avx2 {
namespace {

constexpr int kTile = 6;

// Column of nibble n within a line (see core/layout.h).
constexpr int column_of(int n) { return n % 2 * 4 + n / 2; }

size_t row_bytes(const Matrix& m) {
  const size_t lines = (size_t(m.lines) * kLineColumns + m.groups + 15) / 16;
  return (lines | 1) * 64;  // odd, so that rows of a tile do not fall into one set of the L1 cache
}

void prepare(const Matrix& m, const float* x, uint8_t* row) {
  auto* values = reinterpret_cast<float*>(row);
  float* sums = values + size_t(m.lines) * kLineColumns;
  const __m256 fold = _mm256_setr_ps(1.0f, 0x1p-8f, 0x1p-16f, 0x1p-24f, 0x1p-4f, 0x1p-12f, 0x1p-20f, 1.0f);
  const int group_lines = m.group_lines();
  for (int g = 0; g < m.groups; ++g) {
    __m256 sum = _mm256_setzero_ps();
    const int to = (g + 1) * group_lines < m.lines ? (g + 1) * group_lines : m.lines;
    for (int l = g * group_lines; l < to; ++l) {
      const int at = l * kLineColumns;
      __m256 v;
      if (at + kLineColumns <= m.columns) {
        v = _mm256_loadu_ps(x + at);
      } else {
        alignas(32) float tail[8] = {};
        for (int k = at; k < m.columns; ++k) tail[k - at] = x[k];
        v = _mm256_load_ps(tail);
      }
      sum = _mm256_add_ps(sum, v);
      _mm256_store_ps(values + at, _mm256_mul_ps(v, fold));
    }
    sums[g] = sum_lanes(sum);
  }
}

// What one call reads, for prefetching: blocks of B side by side are B streams.
struct Stream {
  size_t block_bytes;        // of codes
  size_t scale_block_bytes;  // of scales
  const uint8_t* after;      // codes that follow this group of blocks: the next group of the call, or the next call's
};

// A code vector masked in memory: keeps the compiler from holding all code vectors in registers at once.
inline __m256i masked(__m256i mask, const uint8_t* p) {
  __m256i r;
  __asm__("vpand %2, %1, %0" : "=x"(r) : "x"(mask), "m"(*reinterpret_cast<const __m256i*>(p)));
  return r;
}

inline __m256i shifted(const uint8_t* p) {
  return _mm256_srli_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)), 28);
}

struct Source {
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;
};

// One group of B blocks (16 rows each) for M tokens: 2 * B * M independent chains.
template <int M, int B, ScaleType S>
inline __attribute__((always_inline)) void one_group(const Matrix& m, const Source& at, const Stream& stream,
                                                     const float* const (&x)[M], int group, int lines,
                                                     __m256 (&total)[B][M][2]) {
  const size_t first_line = size_t(group) * size_t(m.group_lines());
  const size_t sums_at = size_t(m.lines) * kLineColumns + size_t(group);
  const size_t zeros_bytes = size_t(m.groups) * (kBlockRows / 2);
  __m256 acc[B][M][2];
  if (at.zeros) {
    INT4MOE_UNROLL
    for (int b = 0; b < B; ++b) {
      const IntPair z = load_zeros(at.zeros + b * zeros_bytes + size_t(group) * (kBlockRows / 2));
      const __m256 low = _mm256_cvtepi32_ps(z.low), high = _mm256_cvtepi32_ps(z.high);
      INT4MOE_UNROLL
      for (int t = 0; t < M; ++t) {
        const __m256 sum = _mm256_set1_ps(-x[t][sums_at]);
        acc[b][t][0] = _mm256_mul_ps(low, sum);
        acc[b][t][1] = _mm256_mul_ps(high, sum);
      }
    }
  } else {
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) {
      const __m256 start = _mm256_set1_ps(-8.0f * x[t][sums_at]);
      INT4MOE_UNROLL
      for (int b = 0; b < B; ++b) acc[b][t][0] = acc[b][t][1] = start;
    }
  }

  const uint8_t* codes = at.codes + first_line * kLineBytes;
  const size_t further = first_line * kLineBytes + size_t(ahead_within(ptrdiff_t(stream.block_bytes)));
  const uint8_t* fetch = further < stream.block_bytes ? at.codes + further : stream.after + (further - stream.block_bytes);
  INT4MOE_UNROLL
  for (int b = 0; b < B; ++b) {
    prefetch(at.scales + b * stream.scale_block_bytes + size_t(group + 4) * kBlockRows * scale_bytes(S));
  }
  const float* xs[M];
  INT4MOE_UNROLL
  for (int t = 0; t < M; ++t) xs[t] = x[t] + first_line * kLineColumns;
  for (int l = 0; l < lines; ++l, codes += kLineBytes, fetch += kLineBytes) {
    INT4MOE_UNROLL
    for (int b = 0; b < B; ++b) prefetch(fetch + b * stream.block_bytes);
    INT4MOE_UNROLL
    for (int n = 0; n < 8; ++n) {
      const __m256i mask = _mm256_set1_epi32(n < 7 ? 15 << (4 * n) : 0);
      const auto weights = [&](int b, int h) __attribute__((always_inline)) {
        const uint8_t* p = codes + b * stream.block_bytes + h * (kLineBytes / 2);
        return _mm256_cvtepi32_ps(n < 7 ? masked(mask, p) : shifted(p));
      };
      if constexpr (B == 1) {  // registers are short for activations
        const __m256 low = weights(0, 0), high = weights(0, 1);
        INT4MOE_UNROLL
        for (int t = 0; t < M; ++t) {
          const __m256 xb = _mm256_broadcast_ss(xs[t] + l * kLineColumns + column_of(n));
          acc[0][t][0] = _mm256_fmadd_ps(low, xb, acc[0][t][0]);
          acc[0][t][1] = _mm256_fmadd_ps(high, xb, acc[0][t][1]);
        }
      } else {  // and here for codes
        __m256 xb[M];
        INT4MOE_UNROLL
        for (int t = 0; t < M; ++t) xb[t] = _mm256_broadcast_ss(xs[t] + l * kLineColumns + column_of(n));
        INT4MOE_UNROLL
        for (int b = 0; b < B; ++b) {
          INT4MOE_UNROLL
          for (int h = 0; h < 2; ++h) {
            const __m256 w = weights(b, h);
            INT4MOE_UNROLL
            for (int t = 0; t < M; ++t) acc[b][t][h] = _mm256_fmadd_ps(w, xb[t], acc[b][t][h]);
          }
        }
      }
    }
  }
  INT4MOE_UNROLL
  for (int b = 0; b < B; ++b) {
    const Pair s = load_scales<S>(at.scales + b * stream.scale_block_bytes + size_t(group) * kBlockRows * scale_bytes(S));
    INT4MOE_UNROLL
    for (int t = 0; t < M; ++t) {
      total[b][t][0] = _mm256_fmadd_ps(acc[b][t][0], s.low, total[b][t][0]);
      total[b][t][1] = _mm256_fmadd_ps(acc[b][t][1], s.high, total[b][t][1]);
    }
  }
}

template <int M, int B, ScaleType S>
void tile(const Matrix& m, const Source& at, const Stream& stream, const float* const* rows, float* out,
          size_t out_stride) {
  const float* x[M];
  __m256 total[B][M][2];
  for (int t = 0; t < M; ++t) x[t] = rows[t];
  for (int b = 0; b < B; ++b) {
    for (int t = 0; t < M; ++t) total[b][t][0] = total[b][t][1] = _mm256_setzero_ps();
  }
  const int lines = m.group_lines();
  for (int g = 0; g < m.groups; ++g) {
    const int left = m.lines - g * lines;
    one_group<M, B, S>(m, at, stream, x, g, left < lines ? left : lines, total);
  }
  for (int b = 0; b < B; ++b) {
    for (int t = 0; t < M; ++t) {
      _mm256_store_ps(out + t * out_stride + b * kBlockRows, total[b][t][0]);
      _mm256_store_ps(out + t * out_stride + b * kBlockRows + kHalf, total[b][t][1]);
    }
  }
}

template <ScaleType S>
struct Tiles {
  using Tile = void (*)(const Matrix&, const Source&, const Stream&, const float* const*, float*, size_t);
  // [tokens][log2 of blocks side by side]: enough chains to hide the latency of the multiply-add, within 16 registers
  static constexpr Tile kTable[kTile + 1][3] = {{nullptr, nullptr, nullptr},
                                                {tile<1, 1, S>, tile<1, 2, S>, tile<1, 4, S>},
                                                {tile<2, 1, S>, tile<2, 2, S>, nullptr},
                                                {tile<3, 1, S>, tile<3, 2, S>, nullptr},
                                                {tile<4, 1, S>, nullptr, nullptr},
                                                {tile<5, 1, S>, nullptr, nullptr},
                                                {tile<6, 1, S>, nullptr, nullptr}};
};

template <ScaleType S>
void multiply_as(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
                 const uint8_t* next) {
  const int tiles = (rows.count + kTile - 1) / kTile;
  const int widest = (rows.count + tiles - 1) / tiles;
  const int most = widest == 1 ? 2 : widest <= 3 ? 1 : 0;
  Stream stream{size_t(m.block_codes(1) - m.codes), size_t(m.block_scales(1) - m.scales), nullptr};
  for (int b = 0; b < blocks;) {
    int log = most;
    while (b + (1 << log) > blocks) --log;
    const Source at{m.block_codes(first + b), m.block_scales(first + b), m.block_zeros(first + b)};
    const int then = b + (1 << log);
    for (int t = 0; t < tiles; ++t) {
      const int from = int(int64_t(rows.count) * t / tiles), to = int(int64_t(rows.count) * (t + 1) / tiles);
      const float* x[kTile];
      for (int i = from; i < to; ++i) x[i - from] = reinterpret_cast<const float*>(rows.at(i));
      stream.after = then < blocks ? m.block_codes(first + then) : next ? next : at.codes;
      Tiles<S>::kTable[to - from][log](m, at, stream, x, out + from * out_stride + b * kBlockRows, out_stride);
    }
    b = then;
  }
}

void multiply(const Matrix& m, int first, int blocks, const Rows& rows, float* out, size_t out_stride,
              const uint8_t* next) {
  switch (m.scale_type) {
    case ScaleType::kFloat16:
      return multiply_as<ScaleType::kFloat16>(m, first, blocks, rows, out, out_stride, next);
    case ScaleType::kBFloat16:
      return multiply_as<ScaleType::kBFloat16>(m, first, blocks, rows, out, out_stride, next);
    case ScaleType::kFloat32:
      return multiply_as<ScaleType::kFloat32>(m, first, blocks, rows, out, out_stride, next);
  }
}

}  // namespace
}  // namespace avx2

extern const Kernels kAvx2W4A16;
const Kernels kAvx2W4A16 = {"avx2",
                            "w4a16",
                            kAvx2,
                            avx2::kTile,
                            avx2::row_bytes,
                            avx2::prepare,
                            avx2::multiply,
                            avx2::activate,
                            avx2::load,
                            avx2::store,
                            avx2::accumulate};

}  // namespace int4moe
