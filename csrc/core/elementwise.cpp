#include "core/elementwise.h"

#include <algorithm>
#include <cmath>

#include "core/threads.h"
#include "isa/float_bits.h"

namespace int4moe {
namespace {

// Work below this many elements is done by the calling thread: waking others takes longer.
constexpr int64_t kAlone = 1 << 15;
constexpr int kLanes = 16;

struct Float {
  using Stored = float;
  static float load(float v) { return v; }
  static float store(float v) { return v; }
};

struct BFloat {
  using Stored = uint16_t;
  static float load(uint16_t v) { return bf16_to_float(v); }
  static uint16_t store(float v) { return float_to_bf16(v); }
};

template <class T>
float round_to(float v) {
  return T::load(T::store(v));
}

// 16 sums side by side: the order does not depend on the thread, and the compiler can use vectors.
template <class T>
float inverse_rms(const typename T::Stored* x, int64_t n, float eps) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const float v = T::load(x[i + l]);
      lanes[l] += v * v;
    }
  }
  for (; i < n; ++i) lanes[0] += T::load(x[i]) * T::load(x[i]);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return 1.0f / std::sqrt(sum / float(n) + eps);
}

template <class T>
void normalise(const typename T::Stored* x, const typename T::Stored* weight, int64_t n, float eps,
               typename T::Stored* y) {
  const float inverse = inverse_rms<T>(x, n, eps);
  for (int64_t i = 0; i < n; ++i) y[i] = T::store(T::load(weight[i]) * round_to<T>(T::load(x[i]) * inverse));
}

template <class T>
void rotate_row(const Rotary& r, int64_t row) {
  using Stored = typename T::Stored;
  const int n = r.head_dim, half = n / 2;
  const int64_t at = (row % r.cos_rows) * n;
  const Stored *cos = static_cast<const Stored*>(r.cos) + at, *sin = static_cast<const Stored*>(r.sin) + at;
  for (int h = 0; h < r.heads; ++h) {
    Stored* x = static_cast<Stored*>(r.x) + (row * r.heads + h) * n;
    if (r.norm) normalise<T>(x, static_cast<const Stored*>(r.norm), n, r.eps, x);
    for (int i = 0; i < half; ++i) {
      const float a = T::load(x[i]), b = T::load(x[i + half]);
      x[i] = T::store(a * T::load(cos[i]) - b * T::load(sin[i]));
      x[i + half] = T::store(b * T::load(cos[i + half]) + a * T::load(sin[i + half]));
    }
  }
}

// fn(row) for every row, rows in equal parts to the threads.
template <class F>
void each_row(int64_t rows, int64_t columns, int threads, F&& fn) {
  if (rows * columns < kAlone || threads < 2) {
    for (int64_t r = 0; r < rows; ++r) fn(r);
    return;
  }
  parallel(threads, [&](const Team& team) {
    for (int64_t r = rows * team.id / team.size, end = rows * (team.id + 1) / team.size; r < end; ++r) fn(r);
  });
}

template <class T>
void rms_norm_of(int64_t rows, int64_t columns, const void* x, const void* weight, float eps, void* y, int threads) {
  using Stored = typename T::Stored;
  each_row(rows, columns, threads, [&](int64_t r) {
    normalise<T>(static_cast<const Stored*>(x) + r * columns, static_cast<const Stored*>(weight), columns, eps,
                 static_cast<Stored*>(y) + r * columns);
  });
}

constexpr int kMaxExperts = 1024;

template <class T>
void top_k_row(const TopK& t, int64_t token) {
  const auto* logits = static_cast<const typename T::Stored*>(t.logits) + token * t.experts;
  float p[kMaxExperts];
  for (int e = 0; e < t.experts; ++e) p[e] = T::load(logits[e]);
  const float most = *std::max_element(p, p + t.experts);
  float sum = 0;
  for (int e = 0; e < t.experts; ++e) sum += p[e] = std::exp(p[e] - most);
  for (int e = 0; e < t.experts; ++e) p[e] /= sum;

  int64_t* ids = t.ids + token * t.top_k;
  float score[kMaxExperts], chosen = 0;
  bool taken[kMaxExperts] = {};
  for (int k = 0; k < t.top_k; ++k) {
    int best = -1;  // with NaN every comparison fails: still a valid id
    for (int e = 0; e < t.experts; ++e) {
      if (!taken[e] && (best < 0 || p[e] > p[best])) best = e;
    }
    taken[best] = true;
    ids[k] = best;
    chosen += score[k] = p[best];
  }
  for (int k = 0; k < t.top_k; ++k) {
    const float v = t.normalise ? score[k] / chosen : score[k];
    if (t.score_type == FloatType::kBFloat16) {
      static_cast<uint16_t*>(t.scores)[token * t.top_k + k] = float_to_bf16(v);
    } else {
      static_cast<float*>(t.scores)[token * t.top_k + k] = v;
    }
  }
}

}  // namespace

void softmax_top_k(const TopK& t, int threads) {
  each_row(t.tokens, int64_t(t.experts) * t.top_k, threads, [&](int64_t token) {
    if (t.type == FloatType::kBFloat16) {
      top_k_row<BFloat>(t, token);
    } else {
      top_k_row<Float>(t, token);
    }
  });
}

void rms_norm(FloatType type, int64_t rows, int64_t columns, const void* x, const void* weight, float eps, void* y,
              int threads) {
  const auto run = type == FloatType::kBFloat16 ? rms_norm_of<BFloat> : rms_norm_of<Float>;
  run(rows, columns, x, weight, eps, y, threads);
}

void rotate(const Rotary& r, int threads) {
  each_row(r.rows, int64_t(r.heads) * r.head_dim, threads, [&](int64_t row) {
    if (r.type == FloatType::kBFloat16) {
      rotate_row<BFloat>(r, row);
    } else {
      rotate_row<Float>(r, row);
    }
  });
}

}  // namespace int4moe
