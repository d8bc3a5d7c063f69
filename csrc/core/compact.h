// Bfloat16 weights in 12 bits, exactly: the exponents of a row of weights lie close together, so that four bits tell them
// apart. A row keeps the 15 neighbouring exponents that most of its weights have; the few others (one or two in ten thousand of
// normally distributed weights) are kept beside the row as they are.
#pragma once

#include <cstdint>
#include <memory>

#include "core/dense.h"

namespace int4moe {

constexpr int kCompactColumns = 128;  // that lie together
constexpr int kCompactWords = 96;     // for so many

// A weight's 12 bits: sign, exponent - `exponents[row]` (1..15), 7 bits of mantissa; of 0 and of what is kept beside the sign
// alone.
// Of 128 columns those of columns c, 32 + c and 64 + c fill the upper 12 bits of words c, 32 + c and 64 + c; the lower four of
// these words are the 12 bits of column 96 + c, the highest four first. Columns that are missing at the end are 0.
struct CompactWords {
  const uint16_t* words;     // [rows][ceil(columns / 128)][96], aligned to 64 bytes
  const int16_t* exponents;  // [rows]
  const uint32_t* first;     // [rows + 1], into the next two: a row's weights beside it, by column
  const uint16_t* columns;
  const uint16_t* values;
};

// Words of a row.
static inline int64_t compact_row_words(int64_t columns) {
  return (columns + kCompactColumns - 1) / kCompactColumns * kCompactWords;
}

// Owns what a CompactWords points to.
class Compact {
 public:
  // Of `words` [rows, columns], which may go afterwards. Null where that does not pay or cannot be: a value that is not
  // finite, weights so spread that many would lie beside, rows of more than 32768 columns. Throws std::bad_alloc.
  static std::unique_ptr<Compact> pack(const uint16_t* words, int64_t rows, int64_t columns, int threads);
  ~Compact();
  Compact(const Compact&) = delete;
  Compact& operator=(const Compact&) = delete;

  const CompactWords& words() const { return view_; }
  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t bytes() const { return bytes_; }
  // The weight as it was, [rows, columns].
  void unpack(uint16_t* words) const;

 private:
  Compact(int64_t rows, int64_t columns);

  struct Memory;
  std::unique_ptr<Memory> memory_;
  CompactWords view_{};
  int64_t rows_, columns_, bytes_ = 0;
};

}  // namespace int4moe
