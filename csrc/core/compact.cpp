#include "core/compact.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

#include "core/threads.h"

namespace int4moe {

namespace {

constexpr int kExponents = 15;
constexpr int kGroup = 32;  // columns come in multiples of so many
constexpr int64_t kMostColumns = 1 << 15;
constexpr int64_t kWorth = 256;  // beside lie at most one in so many weights, or one a row

int exponent_of(uint16_t word) { return word >> 7 & 255; }
bool is_zero(uint16_t word) { return !(word & 0x7fff); }

// Exponent 0 is that of zeros and of denormal numbers, which have no leading 1.
bool fits(uint16_t word, int exponent) {
  const int e = exponent_of(word);
  return e && e > exponent && e <= exponent + kExponents;
}

// Loops without branches: compilers turn them into vectors.

int largest(const uint16_t* row, int64_t columns) {
  int16_t most = 0;
  for (int64_t k = 0; k < columns; ++k) most = std::max(most, int16_t(row[k] & 0x7fff));
  return exponent_of(uint16_t(most));
}

int64_t others(const uint16_t* row, int64_t columns, int exponent) {
  int64_t count = 0;
  const auto from = int16_t(std::max(exponent, 0) + 1), to = int16_t(exponent + kExponents);
  for (int64_t k = 0; k < columns; k += kGroup) {
    int16_t some = 0;
    for (int i = 0; i < kGroup; ++i) {
      const auto magnitude = int16_t(row[k + i] & 0x7fff), e = int16_t(magnitude >> 7);
      some = int16_t(some + ((magnitude != 0) & ((e < from) | (e > to))));
    }
    count += some;
  }
  return count;
}

// What to take from the exponents of a row so that most of them become 1..15.
int best_exponent(const uint16_t* row, int64_t columns) {
  const int top = largest(row, columns) - kExponents;
  if (others(row, columns, top) <= columns / kWorth) return top;
  int count[256] = {};
  for (int64_t k = 0; k < columns; ++k) ++count[exponent_of(row[k])];
  int inside = 0, best = 0, most = -1;
  for (int e = 1; e < 255; ++e) {
    inside += count[e] - (e > kExponents ? count[e - kExponents] : 0);
    if (inside > most) {
      most = inside;
      best = e - kExponents;
    }
  }
  return best;
}

// The 12 bits of 32 words, of those that do not fit the sign alone.
void pack_group(const uint16_t* row, int exponent, uint16_t* bits) {
  const auto from = int16_t(std::max(exponent, 0) + 1), to = int16_t(exponent + kExponents);
  const auto lower = uint16_t(exponent << 7);
  for (int i = 0; i < kGroup; ++i) {
    const auto e = int16_t(row[i] >> 7 & 255);
    const auto keep = uint16_t(-int16_t((e >= from) & (e <= to)));
    bits[i] = uint16_t((row[i] >> 4 & 0x800) | (uint16_t((row[i] & 0x7fff) - lower) & keep));
  }
}

void pack_row(const uint16_t* row, int64_t columns, int exponent, uint16_t* to) {
  uint16_t bits[4][kGroup];
  for (int64_t k = 0; k < columns; k += kCompactColumns, to += kCompactWords) {
    for (int part = 0; part < 4; ++part) {
      const int64_t at = k + kGroup * part;
      at < columns ? pack_group(row + at, exponent, bits[part]) : std::fill(bits[part], bits[part] + kGroup, uint16_t(0));
    }
    for (int i = 0; i < kGroup; ++i) {
      const uint16_t last = bits[3][i];
      to[i] = uint16_t(bits[0][i] << 4 | last >> 8);
      to[kGroup + i] = uint16_t(bits[1][i] << 4 | (last >> 4 & 15));
      to[2 * kGroup + i] = uint16_t(bits[2][i] << 4 | (last & 15));
    }
  }
}

uint16_t word_of(uint16_t bits, int exponent) {
  const uint16_t sign = uint16_t((bits & 0x800) << 4);
  return bits & 0x7ff ? uint16_t(sign | ((bits >> 7 & 15) + exponent) << 7 | (bits & 127)) : sign;
}

}  // namespace

struct Compact::Memory {
  uint16_t* words = nullptr;
  size_t bytes = 0;
  std::vector<int16_t> exponents;
  std::vector<uint32_t> first;
  std::vector<uint16_t> columns, values;

  explicit Memory(size_t size) : bytes(size) {
    void* fresh = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fresh == MAP_FAILED) throw std::bad_alloc();
    madvise(fresh, bytes, MADV_HUGEPAGE);
    words = static_cast<uint16_t*>(fresh);
  }
  ~Memory() { munmap(words, bytes); }
};

Compact::Compact(int64_t rows, int64_t columns) : rows_(rows), columns_(columns) {}
Compact::~Compact() = default;

std::unique_ptr<Compact> Compact::pack(const uint16_t* words, int64_t rows, int64_t columns, int threads) {
  if (columns > kMostColumns || rows < 1) return nullptr;
  std::unique_ptr<Compact> c(new Compact(rows, columns));
  const int64_t row_words = compact_row_words(columns);
  std::vector<int16_t> exponents(static_cast<size_t>(rows));
  std::vector<uint32_t> first(static_cast<size_t>(rows) + 1);
  std::atomic<bool> finite{true};
  const auto each_row = [&](auto&& f) {
    parallel(threads, [&](const Team& team) {
      for (int64_t n = rows * team.id / team.size; n < rows * (team.id + 1) / team.size; ++n) f(n, words + n * columns);
    });
  };
  each_row([&](int64_t n, const uint16_t* row) {
    if (largest(row, columns) == 255) finite.store(false, std::memory_order_relaxed);
    const int exponent = best_exponent(row, columns);
    exponents[size_t(n)] = int16_t(exponent);
    first[size_t(n) + 1] = uint32_t(others(row, columns, exponent));
  });
  if (!finite) return nullptr;
  int64_t beside = 0;
  for (size_t n = 1; n < first.size(); ++n) {
    beside += first[n];
    if (beside > rows * std::max<int64_t>(1, columns / kWorth)) return nullptr;
    first[n] = uint32_t(beside);
  }
  c->memory_ = std::make_unique<Memory>(size_t(rows * row_words) * sizeof(uint16_t));
  Memory& m = *c->memory_;
  m.exponents = std::move(exponents);
  m.first = std::move(first);
  m.columns.resize(size_t(beside));
  m.values.resize(size_t(beside));
  each_row([&](int64_t n, const uint16_t* row) {
    const int exponent = m.exponents[size_t(n)];
    pack_row(row, columns, exponent, m.words + n * row_words);
    for (int64_t k = 0, at = m.first[size_t(n)]; at < m.first[size_t(n) + 1]; ++k) {
      if (fits(row[k], exponent) || is_zero(row[k])) continue;
      m.columns[size_t(at)] = uint16_t(k);
      m.values[size_t(at++)] = row[k];
    }
  });
  c->view_ = {m.words, m.exponents.data(), m.first.data(), m.columns.data(), m.values.data()};
  c->bytes_ = int64_t(m.bytes) + 6 * rows + 4 * beside;
  return c;
}

void Compact::unpack(uint16_t* to) const {
  const int64_t row_words = compact_row_words(columns_);
  for (int64_t n = 0; n < rows_; ++n, to += columns_) {
    for (int64_t k = 0; k < columns_; ++k) {
      const uint16_t* w = view_.words + n * row_words + k / kCompactColumns * kCompactWords + k % 32;
      const int64_t part = k % kCompactColumns / 32;
      const int bits = part < 3 ? w[32 * part] >> 4 : (w[0] & 15) << 8 | (w[32] & 15) << 4 | (w[64] & 15);
      to[k] = word_of(uint16_t(bits), view_.exponents[n]);
    }
    for (uint32_t i = view_.first[n]; i < view_.first[n + 1]; ++i) to[view_.columns[i]] = view_.values[i];
  }
}

}  // namespace int4moe
