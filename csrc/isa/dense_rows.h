// Dense linears for a few tokens, over the `Vector` of the file that includes this within its namespace: tiles of kTogether rows
// by kTile tokens, or one row at a time for up to kFew tokens (kCompactFew where weights are in 12 bits). Sums of a row and token
// are kept in 32 lanes, one for each column modulo 32, and added in one order, so that their bits depend neither on the other
// tokens nor on the vectors' width.

constexpr int64_t kBlockWords = 1 << 15;  // of weights that stay in a cache for all tokens
constexpr int64_t kMostRows = 16;         // in such a block
constexpr int kParts = 32 / (2 * Vector::kLanes);  // vectors of words in 32 columns
constexpr int64_t kAhead = 3072;  // bytes

INT4MOE_INLINE void fetch(const void* p) { __asm__ volatile("prefetcht1 (%0)" : : "r"(p)); }

// Which float of a prepared row has a column: within a vector of words the even ones come before the odd ones.
inline int64_t place(int64_t column) {
  constexpr int64_t kWords = 2 * Vector::kLanes;
  const int64_t within = column % kWords;
  return column - within + within % 2 * Vector::kLanes + within / 2;
}

// Sums of R rows by T tokens.
template <int R, int T>
struct Tile {
  Vector::Type sums[R][T][2 * kParts];

  INT4MOE_INLINE void clear() {
    for (auto& row : sums) {
      for (auto& token : row) {
        for (auto& sum : token) sum = Vector::zero();
      }
    }
  }

  // The words of all rows in part `part` of 32 columns, which the rows x are at. The even ones first: both at once would not
  // leave enough registers for the sums.
  INT4MOE_INLINE void add(int part, const Vector::Words (&words)[R], const float* x, size_t stride) {
    Vector::Type values[R];
    INT4MOE_UNROLL
    for (int odd = 0; odd < 2; ++odd) {
      INT4MOE_UNROLL
      for (int r = 0; r < R; ++r) values[r] = odd ? Vector::odd(words[r]) : Vector::even(words[r]);
      INT4MOE_UNROLL
      for (int t = 0; t < T; ++t) {
        const Vector::Type at = Vector::load(x + size_t(t) * stride + (2 * part + odd) * Vector::kLanes);
        INT4MOE_UNROLL
        for (int r = 0; r < R; ++r) sums[r][t][2 * part + odd] = Vector::fma(values[r], at, sums[r][t][2 * part + odd]);
      }
    }
  }
};

// Calls add(32 columns, part, words) for all columns of a row of 12-bit weights.
template <class Add>
INT4MOE_INLINE void each_compact(const uint16_t* row, int64_t columns, Add&& add) {
  for (int64_t k = 0; k < columns; k += kCompactColumns, row += kCompactWords) {
    fetch(row + kAhead / 2);
    fetch(row + kAhead / 2 + 32);
    fetch(row + kAhead / 2 + 64);
    Vector::Words rest[kParts];
    INT4MOE_UNROLL
    for (int i = 0; i < 3; ++i) {
      INT4MOE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        const Vector::Words words = Vector::load_words(row + 32 * i + part * 2 * Vector::kLanes);
        add(k + 32 * i, part, Vector::widened(words));
        rest[part] = i ? Vector::join(rest[part], words, 12 - 4 * i) : Vector::lowest(words);
      }
    }
    INT4MOE_UNROLL
    for (int part = 0; part < kParts; ++part) add(k + 96, part, Vector::widened(rest[part]));
  }
}

// What a row's weights beside it add to its sum for one token.
inline float beside(const CompactWords& w, int64_t row, const float* x) {
  float sum = 0;
  for (uint32_t i = w.first[row]; i < w.first[row + 1]; ++i) {
    sum = __builtin_fmaf(bf16_to_float(w.values[i]), x[kDenseHead + place(w.columns[i])] * x[0], sum);
  }
  return sum;
}

inline void finish(const DenseWeight& w, int64_t n, float sum, const float* x, uint16_t* y) {
  if (w.compact) {
    const uint64_t power = uint64_t(int64_t(w.compact->exponents[n]) + 1023) << 52;
    double factor;
    __builtin_memcpy(&factor, &power, 8);
    sum = float(double(sum) * factor * double(x[0])) + beside(*w.compact, n, x);
  }
  *y = float_to_bf16(w.bias ? sum + bf16_to_float(w.bias[n]) : sum);
}

template <int R, int T>
INT4MOE_INLINE void finish(const DenseWeight& w, int64_t n, const Tile<R, T>& tile, const float* x, uint16_t* y) {
  const size_t stride = dense_row_floats(w.columns);
  for (int r = 0; r < R; ++r) {
    for (int t = 0; t < T; ++t) finish(w, n + r, Vector::total(tile.sums[r][t]), x + size_t(t) * stride, y + t * w.rows + n + r);
  }
}

// Rows first..last where they lie, for so few tokens that all their sums fit in registers.
template <int T>
void few(const DenseWeight& w, int64_t first, int64_t last, const float* x, uint16_t* y) {
  const size_t stride = dense_row_floats(w.columns);
  const float* values = x + kDenseHead;
  const int64_t row_words = w.compact ? compact_row_words(w.columns) : w.columns;
  for (int64_t n = first; n < last; ++n) {
    Tile<1, T> tile;
    tile.clear();
    if (w.compact) {
      each_compact(w.compact->words + n * row_words, w.columns,
                   [&](int64_t k, int part, Vector::Words words) __attribute__((always_inline)) { tile.add(part, {words}, values + k, stride); });
    } else {
      const uint16_t* row = w.words + n * row_words;
      for (int64_t k = 0; k < w.columns; k += 32) {
        fetch(row + k + kAhead / 2);
        INT4MOE_UNROLL
        for (int part = 0; part < kParts; ++part) {
          tile.add(part, {Vector::load_words(row + k + part * 2 * Vector::kLanes)}, values + k, stride);
        }
      }
    }
    finish(w, n, tile, x, y);
  }
}

// Rows first..last, whose words begin at `words`; `next` is fetched meanwhile, `step` bytes for each 32 columns.
template <int R, int T>
void many(const DenseWeight& w, int64_t first, int64_t last, const uint16_t* words, const float* x, uint16_t* y,
          const uint8_t* next, int64_t step) {
  const size_t stride = dense_row_floats(w.columns);
  for (int64_t n = first; n + R <= last; n += R, words += R * w.columns) {
    Tile<R, T> tile;
    tile.clear();
    for (int64_t k = 0; k < w.columns; k += 32) {
      INT4MOE_UNROLL
      for (int r = 0; r < R; ++r, next += step) fetch(next);
      INT4MOE_UNROLL
      for (int part = 0; part < kParts; ++part) {
        Vector::Words of[R];
        INT4MOE_UNROLL
        for (int r = 0; r < R; ++r) of[r] = Vector::load_words(words + r * w.columns + k + part * 2 * Vector::kLanes);
        tile.add(part, of, x + kDenseHead + k, stride);
      }
    }
    finish(w, n, tile, x, y);
  }
}

template <int T>
void tile_rows(const DenseWeight& w, int64_t first, int64_t last, const uint16_t* words, const float* x, uint16_t* y,
               const uint8_t* next, int64_t step) {
  const int64_t whole = first + (last - first) / Vector::kTogether * Vector::kTogether;
  many<Vector::kTogether, T>(w, first, whole, words, x, y, next, step);
  next += step * (whole - first) * (w.columns / 32);
  many<1, T>(w, whole, last, words + (whole - first) * w.columns, x, y, next, step);
}

template <int T = Vector::kTile>
void tile_of(int tokens, const DenseWeight& w, int64_t first, int64_t last, const uint16_t* words, const float* x, uint16_t* y,
             const uint8_t* next, int64_t step) {
  if (tokens >= T) return tile_rows<T>(w, first, last, words, x, y, next, step);
  if constexpr (T > 1) tile_of<T - 1>(tokens, w, first, last, words, x, y, next, step);
}

template <int T = Vector::kTile>
void few_of(int tokens, const DenseWeight& w, int64_t first, int64_t last, const float* x, uint16_t* y) {
  if (tokens == T) return few<T>(w, first, last, x, y);
  if constexpr (T > 1) few_of<T - 1>(tokens, w, first, last, x, y);
}

// A block of rows as bfloat16 words, scaled as the 12 bits say.
void expand(const DenseWeight& w, int64_t first, int64_t last, uint16_t* words) {
  const int64_t row_words = compact_row_words(w.columns);
  for (int64_t n = first; n < last; ++n, words += w.columns) {
    each_compact(w.compact->words + n * row_words, w.columns, [&](int64_t k, int part, Vector::Words v) __attribute__((always_inline)) {
      if (k < w.columns) Vector::store_words(words + k + part * 2 * Vector::kLanes, v);
    });
  }
}

void rows(const DenseWeight& w, int64_t first, int64_t last, int tokens, const float* x, uint16_t* y) {
  if (tokens <= (w.compact ? Vector::kCompactFew : Vector::kFew)) return few_of(tokens, w, first, last, x, y);
  alignas(64) uint16_t expanded[kBlockWords];
  const int64_t block = w.compact ? std::max<int64_t>(1, std::min(kMostRows, kBlockWords / w.columns)) : kMostRows;
  const int64_t row_words = w.compact ? compact_row_words(w.columns) : w.columns;
  const uint16_t* stored = w.compact ? w.compact->words : w.words;
  // The next block comes from memory meanwhile, a part of it with each tile.
  const int tiles = (tokens + Vector::kTile - 1) / Vector::kTile;
  const int64_t step = ((w.compact ? 48 : 64) + tiles - 1) / tiles;  // bytes for each 32 columns of a row
  for (int64_t n = first, end; n < last; n = end) {
    end = std::min(last, n + block);
    const uint16_t* words = w.words + n * w.columns;
    if (w.compact) {
      expand(w, n, end, expanded);
      words = expanded;
    }
    const auto* next = reinterpret_cast<const uint8_t*>(stored + (end < last ? end : n) * row_words);
    for (int from = 0; from < tokens; from += Vector::kTile, next += step * (end - n) * (w.columns / 32)) {
      tile_of(std::min(Vector::kTile, tokens - from), w, n, end, words, x + size_t(from) * dense_row_floats(w.columns),
              y + from * w.rows, next, step);
    }
  }
}

void prepare(int64_t columns, const uint16_t* x, bool compact, float* row) {
  float factor = 1;
  row[0] = 1;
  if (compact) {
    // 12-bit weights are read as numbers of 2^-126 to 2^-111, so that the row has to be large: its largest becomes 2^110.
    uint16_t most = 0;
    for (int64_t k = 0; k < columns; ++k) most = std::max<uint16_t>(most, x[k] & 0x7fff);
    const int power = std::min(126, 110 + 127 - (most >> 7));
    factor = bits_to_float(uint32_t(power + 127) << 23);
    row[0] = bits_to_float(uint32_t(127 - power) << 23);
  }
  float* to = row + kDenseHead;
  const Vector::Type scale = Vector::set1(factor);
  for (int64_t k = 0; k < columns; k += 2 * Vector::kLanes) {
    const Vector::Words words = Vector::load_words(x + k);
    Vector::store(to + k, Vector::mul(Vector::even(words), scale));
    Vector::store(to + k + Vector::kLanes, Vector::mul(Vector::odd(words), scale));
  }
  std::fill(to + columns, row + dense_row_floats(columns), 0.0f);
}
