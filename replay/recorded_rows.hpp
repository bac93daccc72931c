// recorded_rows: the full cache's attention of a recorded layer, row by row in bounded memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "kernels/kv_cache.hpp"
#include "replay/layer_data.hpp"

namespace kvreplay::replay {

// rows [q_heads, stride]: A(t, h, i) for i <= t, zero outside the layer's window.
struct attention_rows {
  std::int64_t t = 0, stride = 0;
  const float* rows = nullptr;
  std::span<const float> head(int h) const {
    return {rows + h * stride, static_cast<std::size_t>(t + 1)};
  }
};

// Calls visit for t = first .. last - 1 in order; `shape` has this layer as its layer 0. first must
// not lie before data.first_row. About 32 MiB of rows are held at a time.
void for_each_row(const kernels::cache_shape& shape, const layer_data& data, std::int64_t first,
                  std::int64_t last, const std::function<void(const attention_rows&)>& visit);

}  // namespace kvreplay::replay
