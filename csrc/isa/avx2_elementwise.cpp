// Plain C++ that the compiler turns into vectors, but for exponentials.
#include "isa/avx2_elementwise.h"

#include <algorithm>

#pragma GCC diagnostic ignored "-Wunused-function"
#include "isa/avx2_common.h"
#include "isa/float_bits.h"

namespace int4moe {
namespace avx2 {
namespace {

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
  return 1.0f / __builtin_sqrtf(sum / float(n) + eps);
}

template <class T>
void normalise(const typename T::Stored* x, const typename T::Stored* weight, int64_t n, float eps,
               typename T::Stored* y) {
  const float inverse = inverse_rms<T>(x, n, eps);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = T::store(T::load(weight[i]) * round_to<T>(T::load(x[i]) * inverse));
}

template <class T>
void rotate_row(const Rotary& r, int64_t row) {
  using Stored = typename T::Stored;
  const int n = r.head_dim, half = r.turned / 2;
  const int64_t at = (row % r.cos_rows) * r.turned;
  const Stored *cos = static_cast<const Stored*>(r.cos) + at, *sin = static_cast<const Stored*>(r.sin) + at;
  for (int h = 0; h < r.heads; ++h) {
    Stored* x = static_cast<Stored*>(r.x) + (row * r.heads + h) * n;
    if (r.norm) normalise<T>(x, static_cast<const Stored*>(r.norm), n, r.eps, x);
#pragma GCC ivdep
    for (int i = 0; i < half; ++i) {
      const float a = T::load(x[i]), b = T::load(x[i + half]);
      x[i] = T::store(a * T::load(cos[i]) - b * T::load(sin[i]));
      x[i + half] = T::store(b * T::load(cos[i + half]) + a * T::load(sin[i + half]));
    }
  }
}

template <class T, class Table>
void rotate_pairs_row(const PairRotary& r, int64_t row) {
  const int half = r.turned / 2, step = r.step;
  const int64_t at = (row % r.cos_rows) * r.turned;
  const auto *cos = static_cast<const typename Table::Stored*>(r.cos) + at, *sin = static_cast<const typename Table::Stored*>(r.sin) + at;
  float first[kMostTurned / 2], second[kMostTurned / 2];
  for (int h = 0; h < r.heads; ++h) {
    auto* x = static_cast<typename T::Stored*>(r.x) + row * r.stride[0] + h * r.stride[1];
    for (int i = 0; i < half; ++i) {
      const float a = T::load(x[2 * i]), b = T::load(x[2 * i + 1]);
      const float c = Table::load(cos[i * step]), s = Table::load(sin[i * step]);
      first[i] = a * c - b * s;
      second[i] = b * c + a * s;
    }
    for (int i = 0; i < half; ++i) {
      x[r.apart ? i : 2 * i] = T::store(first[i]);
      x[r.apart ? i + half : 2 * i + 1] = T::store(second[i]);
    }
  }
}

float greatest(const float* p, int n) {
  float most = p[0];
  for (int i = 1; i < n; ++i) most = p[i] > most ? p[i] : most;
  return most;
}

constexpr int kMaxExperts = 1024;

// The greatest of p[first..last) that is not taken; with NaN every comparison fails, which still gives a valid one.
int best_of(const float* p, const bool* taken, int first, int last) {
  int best = -1;
  for (int e = first; e < last; ++e) {
    if (!taken[e] && (best < 0 || p[e] > p[best])) best = e;
  }
  return best;
}

// All experts are taken but those of the groups with the greatest p.
void open_groups(const TopK& t, const float* p, bool* taken) {
  const int size = t.experts / t.groups;
  float group[kMaxExperts];
  bool closed[kMaxExperts] = {};
  for (int g = 0; g < t.groups; ++g) group[g] = greatest(p + g * size, size);
  std::fill_n(taken, t.experts, true);
  for (int i = 0; i < t.top_groups; ++i) {
    const int g = best_of(group, closed, 0, t.groups);
    closed[g] = true;
    std::fill_n(taken + g * size, size, false);
  }
}

template <class T>
void top_k_row(const TopK& t, int64_t token) {
  const auto* logits = static_cast<const typename T::Stored*>(t.logits) + token * t.experts;
  float p[kMaxExperts];
  for (int e = 0; e < t.experts; ++e) p[e] = T::load(logits[e]);
  const float most = greatest(p, t.experts);
  float sum = 0;
  for (int e = 0; e < t.experts; ++e) sum += p[e] = __builtin_expf(p[e] - most);
  for (int e = 0; e < t.experts; ++e) p[e] /= sum;

  int64_t* ids = t.ids + token * t.top_k;
  float score[kMaxExperts], chosen = 0;
  bool taken[kMaxExperts] = {};
  if (t.top_groups < t.groups) open_groups(t, p, taken);
  for (int k = 0; k < t.top_k; ++k) {
    const int best = best_of(p, taken, 0, t.experts);
    taken[best] = true;
    ids[k] = best;
    chosen += score[k] = p[best];
  }
  for (int k = 0; k < t.top_k; ++k) {
    const float v = (t.normalise ? score[k] / chosen : score[k]) * t.factor;
    if (t.score_type == FloatType::kBFloat16) {
      static_cast<uint16_t*>(t.scores)[token * t.top_k + k] = float_to_bf16(v);
    } else {
      static_cast<float*>(t.scores)[token * t.top_k + k] = v;
    }
  }
}

template <class T>
void gated(int64_t count, const typename T::Stored* gate, const typename T::Stored* up, typename T::Stored* y) {
  constexpr int64_t kAtOnce = 256;
  alignas(32) float a[kAtOnce] = {};
  for (int64_t at = 0; at < count; at += kAtOnce) {
    const int64_t n = std::min(kAtOnce, count - at);
    for (int64_t i = 0; i < n; ++i) a[i] = T::load(gate[at + i]);
    activate_all<ActivationKind::kSilu>(nullptr, a, a, size_t(n + 7) / 8 * 8);
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) y[at + i] = T::store(round_to<T>(a[i]) * T::load(up[at + i]));
  }
}

template <class T>
void add_scaled(int64_t n, const typename T::Stored* x, const typename T::Stored* shared, const typename T::Stored* score,
                typename T::Stored* y) {
  const float weight = round_to<T>(1.0f / (1.0f + __builtin_expf(-T::load(*score))));
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) y[i] = T::store(T::load(x[i]) + round_to<T>(weight * T::load(shared[i])));
}

}  // namespace

void rms_norm_row(FloatType type, int64_t columns, const void* x, const void* weight, float eps, void* y) {
  if (type == FloatType::kBFloat16) {
    normalise<BFloat>(static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(weight), columns, eps,
                      static_cast<uint16_t*>(y));
  } else {
    normalise<Float>(static_cast<const float*>(x), static_cast<const float*>(weight), columns, eps,
                     static_cast<float*>(y));
  }
}

void rotate_one(const Rotary& r, int64_t row) {
  r.type == FloatType::kBFloat16 ? rotate_row<BFloat>(r, row) : rotate_row<Float>(r, row);
}

void rotate_pairs_one(const PairRotary& r, int64_t row) {
  if (r.table_type == FloatType::kFloat32) {
    r.type == FloatType::kBFloat16 ? rotate_pairs_row<BFloat, Float>(r, row) : rotate_pairs_row<Float, Float>(r, row);
  } else {
    r.type == FloatType::kBFloat16 ? rotate_pairs_row<BFloat, BFloat>(r, row) : rotate_pairs_row<Float, BFloat>(r, row);
  }
}

void top_k_one(const TopK& t, int64_t token) {
  t.type == FloatType::kBFloat16 ? top_k_row<BFloat>(t, token) : top_k_row<Float>(t, token);
}

void sigmoid_top_k_one(const SigmoidTopK& t, int64_t token) {
  const int size = t.experts / t.groups;
  alignas(32) float score[kMaxExperts], choice[kMaxExperts];
  float group[kMaxExperts];
  bool taken[kMaxExperts], closed[kMaxExperts] = {};
  std::copy_n(t.logits + token * t.experts, t.experts, score);
  std::fill(score + t.experts, score + (t.experts + 7) / 8 * 8, 0.0f);
  for (int e = 0; e < t.experts; e += 8) {
    _mm256_store_ps(score + e, gated_by_sigmoid(_mm256_set1_ps(1.0f), _mm256_load_ps(score + e)));
  }
  for (int e = 0; e < t.experts; ++e) choice[e] = score[e] + t.bias[e];
  std::fill_n(taken, t.experts, false);
  for (int g = 0; g < t.groups; ++g) {
    const int first = best_of(choice, taken, g * size, (g + 1) * size);
    taken[first] = true;
    group[g] = choice[first] + choice[best_of(choice, taken, g * size, (g + 1) * size)];
  }
  std::fill_n(taken, t.experts, true);
  for (int i = 0; i < t.top_groups; ++i) {
    const int g = best_of(group, closed, 0, t.groups);
    closed[g] = true;
    std::fill_n(taken + g * size, size, false);
  }
  int64_t* ids = t.ids + token * t.top_k;
  float *scores = t.scores + token * t.top_k, sum = 0;
  for (int k = 0; k < t.top_k; ++k) {
    const int best = best_of(choice, taken, 0, t.experts);
    taken[best] = true;
    ids[k] = best;
    sum += scores[k] = score[best];
  }
  for (int k = 0; k < t.top_k; ++k) scores[k] = (t.normalise ? scores[k] / (sum + 1e-20f) : scores[k]) * t.factor;
}

void gated_silu(FloatType type, int64_t count, const void* gate, const void* up, void* y) {
  if (type == FloatType::kBFloat16) {
    gated<BFloat>(count, static_cast<const uint16_t*>(gate), static_cast<const uint16_t*>(up), static_cast<uint16_t*>(y));
  } else {
    gated<Float>(count, static_cast<const float*>(gate), static_cast<const float*>(up), static_cast<float*>(y));
  }
}

void add_scaled_row(FloatType type, int64_t columns, const void* x, const void* shared, const void* score, void* y) {
  if (type == FloatType::kBFloat16) {
    add_scaled<BFloat>(columns, static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(shared),
                       static_cast<const uint16_t*>(score), static_cast<uint16_t*>(y));
  } else {
    add_scaled<Float>(columns, static_cast<const float*>(x), static_cast<const float*>(shared),
                      static_cast<const float*>(score), static_cast<float*>(y));
  }
}

void add_bf16(int64_t count, const uint16_t* x, uint16_t* y) {
#pragma GCC ivdep
  for (int64_t i = 0; i < count; ++i) y[i] = float_to_bf16(bf16_to_float(y[i]) + bf16_to_float(x[i]));
}

}  // namespace avx2
}  // namespace int4moe
