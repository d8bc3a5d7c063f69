#pragma once

#include <cstdint>

#include "core/attention.h"

namespace int4moe {
namespace avx2 {

// Rows (token, head) that share one pass over the keys.
constexpr int kAttentionRows = 64;

// Tokens [first, last) of all heads that belong to one key/value head.
void attend(const AttentionArgs& a, int64_t batch, int kv_head, int64_t first, int64_t last);

}  // namespace avx2
}  // namespace int4moe
