// Row-major offsets and element counts, 64-bit before the first multiply.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace kvreplay::traces {

// Offset of [position, head, lane] in a row-major [*, heads, dim] array.
constexpr std::int64_t row_offset(std::int64_t position, std::int64_t heads, std::int64_t head,
                                  std::int64_t dim, std::int64_t lane = 0) {
  return (position * heads + head) * dim + lane;
}

// Product of extents, or nothing where it is negative or leaves 63 bits.
inline std::optional<std::int64_t> element_count(std::span<const std::int64_t> extents) {
  std::int64_t count = 1;
  bool overflow = false, empty = false;
  for (const std::int64_t extent : extents) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) empty = true;
    overflow = overflow || __builtin_mul_overflow(count, extent, &count);
  }
  if (empty) return 0;
  if (overflow) return std::nullopt;
  return count;
}

}  // namespace kvreplay::traces
