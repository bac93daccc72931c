// append: one new entry per KV head; entries that fall out of the layer's own window leave.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

struct append_item {
  kv_cache* cache = nullptr;
  int layer = 0;
  std::int32_t position = 0;
  const float* k = nullptr;  // [kv_heads, head_dim]; rounded to FP16 when stored in an FP16 tail
  const float* v = nullptr;  // [kv_heads, value_dim]
};

// Appends in the tail with an unobserved score. In a windowed layer the entries with position
// <= item.position - window are dropped (no eviction: the model never kept them).
// Throws std::invalid_argument naming layer, head and position for a non-finite or (FP16 tail)
// out-of-range value, or a position that is not newer than every entry held.
void append(std::span<const append_item> items);

}  // namespace kvreplay::kernels
