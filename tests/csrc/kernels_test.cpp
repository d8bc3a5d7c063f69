// Every row's prepare and multiply: against float64, against integers (exactly), the same bits for a token whatever the
// batch, the block range and the gathering, and nothing written outside.
#include "kernels_test.h"

#include <cmath>
#include <cstring>

#include "cases.h"

namespace tests {

using namespace int4moe;

namespace {

constexpr int kTokens = 64;

// Each kind of zeros, scale type and tail with each group size; rows and columns end inside blocks, lines and tiles.
const Shape kShapes[] = {
    {48, 256, 128, Zeros::kNone, ScaleType::kFloat16},    {33, 192, 64, Zeros::kRandom, ScaleType::kBFloat16},
    {80, 128, 32, Zeros::kRandom, ScaleType::kFloat32},   {16, 96, 32, Zeros::kNone, ScaleType::kFloat32},
    {20, 80, 16, Zeros::kRandom, ScaleType::kFloat16},    {7, 40, 8, Zeros::kRandom, ScaleType::kFloat32},
    {40, 72, 24, Zeros::kNone, ScaleType::kBFloat16},     {17, 120, 40, Zeros::kRandom, ScaleType::kFloat16},
    {33, 34, 34, Zeros::kRandom, ScaleType::kFloat16},    {24, 50, 50, Zeros::kNone, ScaleType::kBFloat16},
    {64, 150, 128, Zeros::kRandom, ScaleType::kFloat16},  {16, 2, 2, Zeros::kRandom, ScaleType::kFloat32},
    {18, 200, 64, Zeros::kEight, ScaleType::kBFloat16},   {31, 256, 256, Zeros::kRandom, ScaleType::kBFloat16},
    {20, 2200, 2200, Zeros::kRandom, ScaleType::kFloat16}, {16, 2304, 1152, Zeros::kNone, ScaleType::kFloat32},
    // Several stretches of short groups, the last one shorter.
    {32, 416, 32, Zeros::kNone, ScaleType::kFloat16},     {70, 336, 32, Zeros::kRandom, ScaleType::kBFloat16},
    {20, 320, 64, Zeros::kRandom, ScaleType::kFloat16},   {18, 296, 24, Zeros::kNone, ScaleType::kFloat32},
    // All that AMX makes passes of: 4, 2 and 1 blocks; 4 blocks of as long segments as it takes together, and longer ones.
    {112, 160, 96, Zeros::kRandom, ScaleType::kBFloat16}, {64, 520, 512, Zeros::kNone, ScaleType::kFloat16},
    {48, 600, 600, Zeros::kRandom, ScaleType::kFloat16},
    // Groups that are not whole segments of W4A8's activations, whichever length these have.
    {33, 144, 48, Zeros::kRandom, ScaleType::kBFloat16},  {16, 352, 176, Zeros::kNone, ScaleType::kFloat16},
    {40, 352, 176, Zeros::kRandom, ScaleType::kFloat32, true}, {24, 230, 96, Zeros::kNone, ScaleType::kFloat16, true},
    {17, 600, 600, Zeros::kRandom, ScaleType::kFloat16, true}, {48, 256, 128, Zeros::kNone, ScaleType::kFloat16, true},
};

// Prepared rows of a token list.
class Prepared {
 public:
  Prepared(const Kernels& k, const Matrix& m, const std::vector<float>& x)
      : stride_(k.row_bytes(m)), count_(int(x.size() / size_t(m.columns))), rows_(stride_ * size_t(count_)) {
    check(stride_ % 64 == 0, "%s: row_bytes %zu is a multiple of 64", k.isa, stride_);
    for (int i = 0; i < count_; ++i) k.prepare(m, x.data() + size_t(i) * m.columns, rows_.data() + stride_ * size_t(i));
  }
  Rows all() { return {rows_.data(), stride_, nullptr, count_}; }
  Rows part(int from, int count) { return {rows_.data() + stride_ * size_t(from), stride_, nullptr, count}; }
  Rows gathered(const int32_t* index, int count) { return {rows_.data(), stride_, index, count}; }

 private:
  size_t stride_;
  int count_;
  Buffer<uint8_t> rows_;
};

std::vector<float> random_tokens(const Weight& w, Random& random, FloatType type) {
  std::vector<float> x(size_t(kTokens) * w.shape().columns);
  for (size_t i = 0; i < x.size(); ++i) {
    // Some tokens are large, some small, one is all zeros.
    const int token = int(i) / w.shape().columns;
    const float size = token == 5 ? 0.0f : token % 7 == 3 ? 300.0f : token % 7 == 4 ? 1e-3f : 1.0f;
    x[i] = round_to(type, random.normal() * size);
  }
  return x;
}

// Integers for which every step of every kernel is exact: the largest of each stretch makes the quantisation of the
// row's activations the identity, and all sums stay below 2^24.
std::vector<float> integer_tokens(const Kernels& k, const Weight& w, Random& random) {
  const int largest = is_w4a8(k) ? 127 : 32767;
  const int stretch = is_w4a8(k) ? 32 : 256;
  std::vector<float> x(size_t(kTokens) * w.shape().columns);
  for (int t = 0; t < kTokens; ++t) {
    float* row = x.data() + size_t(t) * w.shape().columns;
    for (int g = 0; g < w.groups(); ++g) {
      for (int k0 = w.from(g); k0 < w.to(g); k0 += stretch) {
        const int end = k0 + stretch < w.to(g) ? k0 + stretch : w.to(g);
        for (int j = k0; j < end; ++j) row[j] = float(random.below(17) - 8);
        row[k0 + random.below(end - k0)] = float(random.below(2) ? largest : -largest);
      }
    }
  }
  return x;
}

// out of all tokens, each computed alone
std::vector<float> one_by_one(const Kernels& k, const Matrix& m, Prepared& rows) {
  const size_t stride = size_t(m.blocks) * kBlockRows;
  Buffer<float> out(stride * kTokens);
  for (int t = 0; t < kTokens; ++t) {
    k.multiply(m, 0, m.blocks, rows.part(t, 1), out.data() + stride * size_t(t), stride, nullptr);
  }
  return {out.data(), out.data() + stride * kTokens};
}

void check_against_float64(const Kernels& k, const std::string& name, const Weight& w, const std::vector<float>& x,
                           const std::vector<float>& out) {
  const int n = w.shape().rows;
  const size_t stride = out.size() / kTokens;
  Error error, quantised;
  for (int t = 0; t < kTokens; ++t) {
    const float* row = x.data() + size_t(t) * w.shape().columns;
    for (int r = 0; r < n; ++r) {
      const double found = double(out[stride * size_t(t) + size_t(r)]);
      error.add(found, w.exact(r, row));
      if (is_w4a8(k)) quantised.add(found, w.exact_w4a8(r, row, segment_columns(k, w.shape().heavy_tails)));
    }
    for (size_t r = size_t(n); r < stride; ++r) {
      check(out[stride * size_t(t) + r] == 0.0f, "%s, %s: padding row %zu gives 0", name.c_str(),
            w.shape().name().c_str(), r);
    }
  }
  const double bound = meant_for(k).bound;
  check(error.value() <= bound, "%s, %s: relative error %.3g is at most %.3g", name.c_str(), w.shape().name().c_str(),
        error.value(), bound);
  if (is_w4a8(k)) {
    check(quantised.value() <= 1e-6, "%s, %s: %.3g from integer arithmetic on int8 activations", name.c_str(),
          w.shape().name().c_str(), quantised.value());
  }
}

void check_integers(const Kernels& k, const std::string& name, Weight& w, Random& random) {
  const Matrix m = w.matrix();
  const std::vector<float> x = integer_tokens(k, w, random);
  Prepared rows(k, m, x);
  const std::vector<float> out = one_by_one(k, m, rows);
  const size_t stride = out.size() / kTokens;
  for (int t = 0; t < kTokens; ++t) {
    for (int r = 0; r < m.rows; ++r) {
      const double exact = w.exact(r, x.data() + size_t(t) * m.columns);
      const double found = double(out[stride * size_t(t) + size_t(r)]);
      if (!check(found == exact, "%s, %s: row %d of token %d is %.9g, exactly %.9g", name.c_str(),
                 w.shape().name().c_str(), r, t, found, exact)) {
        return;
      }
    }
  }
}

bool same_bits(const float* a, const float* b, size_t count) { return !std::memcmp(a, b, count * sizeof(float)); }

// M tokens from `from` on, gathered in reverse order when asked, against the same tokens computed alone.
void check_batch(const Kernels& k, const std::string& name, const Matrix& m, Prepared& rows,
                 const std::vector<float>& alone, int from, int count, bool gather, const std::string& shape) {
  const size_t stride = size_t(m.blocks) * kBlockRows;
  Buffer<float> out(stride * size_t(count) + 16);
  float* data = out.data();
  uint32_t guard;
  std::memcpy(&guard, data, 4);
  std::vector<int32_t> index;
  for (int i = 0; i < count; ++i) index.push_back(gather ? from + count - 1 - i : from + i);
  const Rows batch = gather ? rows.gathered(index.data(), count) : rows.part(from, count);
  k.multiply(m, 0, m.blocks, batch, data, stride, m.codes);
  for (int i = 0; i < count; ++i) {
    if (!check(same_bits(data + stride * size_t(i), alone.data() + stride * size_t(index[size_t(i)]), stride),
               "%s, %s: token %d of %d%s has the bits that it has alone", name.c_str(), shape.c_str(), i, count,
               gather ? " gathered" : "")) {
      return;
    }
  }
  for (int i = 0; i < 16; ++i) {
    uint32_t behind;
    std::memcpy(&behind, data + stride * size_t(count) + i, 4);
    check(behind == guard, "%s, %s: nothing is written behind %d tokens", name.c_str(), shape.c_str(), count);
  }
}

// Each block range, for few tokens and for many, with the others untouched.
void check_blocks(const Kernels& k, const std::string& name, const Matrix& m, Prepared& rows,
                  const std::vector<float>& alone, const std::string& shape) {
  const size_t stride = size_t(m.blocks) * kBlockRows;
  for (const int count : {3, 19}) {
    for (int first = 0; first < m.blocks; ++first) {
      for (int blocks = 1; first + blocks <= m.blocks; ++blocks) {
        const size_t width = size_t(blocks) * kBlockRows;
        Buffer<float> out(width * size_t(count));
        k.multiply(m, first, blocks, rows.part(9, count), out.data(), width, nullptr);
        bool same = true;
        for (size_t i = 0; i < size_t(count); ++i) {
          same &= same_bits(out.data() + width * i, alone.data() + stride * (9 + i) + size_t(first) * kBlockRows, width);
        }
        check(same, "%s, %s: blocks %d to %d alone have the same bits for %d tokens", name.c_str(), shape.c_str(), first,
              first + blocks, count);
      }
    }
  }
}

void check_not_finite(const Kernels& k, const std::string& name, Weight& w, std::vector<float> x,
                      const std::vector<float>& alone) {
  const Matrix m = w.matrix();
  const size_t stride = size_t(m.blocks) * kBlockRows;
  x[size_t(2 * m.columns) + size_t(m.columns / 2)] = NAN;
  Prepared rows(k, m, x);
  for (const int count : {4, 18}) {
    Buffer<float> out(stride * size_t(count));
    k.multiply(m, 0, m.blocks, rows.part(0, count), out.data(), stride, nullptr);
    for (int r = 0; r < m.rows; ++r) {
      check(std::isnan(out[2 * stride + size_t(r)]), "%s, %s: NaN in one of %d tokens gives NaN", name.c_str(),
            w.shape().name().c_str(), count);
    }
    for (size_t t = 0; t < size_t(count); ++t) {
      check(t == 2 || same_bits(out.data() + stride * t, alone.data() + stride * t, stride),
            "%s, %s: NaN in one of %d tokens leaves token %zu alone", name.c_str(), w.shape().name().c_str(), count, t);
    }
  }
}

}  // namespace

void test_row(const Kernels& k, bool quick) {
  const std::string name = row_name(k);
  uint64_t seed = 1;
  for (const Shape& shape : kShapes) {
    Random random(++seed);
    Weight w(shape, random, false), unit(shape, random, true);
    const Matrix m = w.matrix();
    const std::vector<float> x = random_tokens(w, random, meant_for(k).type);
    Prepared rows(k, m, x);
    const std::vector<float> alone = one_by_one(k, m, rows);
    check_against_float64(k, name, w, x, alone);
    check_integers(k, name, unit, random);
    // Large matrices are slow on an emulator: every count on the others.
    const int step = quick || shape.columns > 1000 ? 11 : shape.rows * shape.columns > 16000 ? 5 : 1;
    for (int count = 1; count <= kTokens; count += step) {
      check_batch(k, name, m, rows, alone, (kTokens - count) / 2, count, count % 2 == 0, shape.name());
    }
    check_batch(k, name, m, rows, alone, 0, kTokens, true, shape.name());
    check_blocks(k, name, m, rows, alone, shape.name());
    check_not_finite(k, name, w, x, alone);
  }
}

void test_same_bits(const Kernels& a, const Kernels& b) {
  const std::string names = row_name(a) + " and " + row_name(b);
  uint64_t seed = 100;
  for (const Shape& shape : kShapes) {
    Random random(++seed);
    Weight w(shape, random, false);
    const Matrix m = w.matrix();
    const std::vector<float> x = random_tokens(w, random, FloatType::kFloat32);
    Prepared rows_a(a, m, x), rows_b(b, m, x);
    const size_t stride = size_t(m.blocks) * kBlockRows;
    Buffer<float> out_a(stride * kTokens), out_b(stride * kTokens);
    a.multiply(m, 0, m.blocks, rows_a.all(), out_a.data(), stride, nullptr);
    b.multiply(m, 0, m.blocks, rows_b.all(), out_b.data(), stride, nullptr);
    check(same_bits(out_a.data(), out_b.data(), stride * kTokens), "%s, %s: the same bits", names.c_str(),
          shape.name().c_str());
  }
}

}  // namespace tests
