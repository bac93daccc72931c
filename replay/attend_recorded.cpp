#include "replay/attend_recorded.hpp"

#include <algorithm>
#include <vector>

#include "replay/layer_data.hpp"

namespace kvreplay::replay {

void attend_recorded(const kernels::kv_cache& cache, int slot, const float* rows,
                     std::int64_t stride, kernels::mass_layout layout, float* mass,
                     std::int64_t mass_stride) {
  const auto& shape = cache.shape();
  const bool sinks = !shape.sink_logits.empty();
  std::vector<float> own(static_cast<size_t>(shape.q_heads * mass_stride), 0.0F), reduced;
  for (int h = 0; h < shape.q_heads; ++h) {
    const auto& store = cache.head(slot, h / shape.group());
    const float* row = rows + std::int64_t{h} * stride;
    std::vector<std::int32_t> positions;  // ascending: sums must not depend on slots
    for (int e = 0; e < store.size(); ++e) positions.push_back(store.position(e));
    std::sort(positions.begin(), positions.end());
    double held = 0, all = 0;
    for (const std::int32_t p : positions) held += row[p];
    for (std::int64_t i = 0; sinks && i < stride; ++i) all += row[i];
    const double total = held + (sinks ? std::max(0.0, 1 - all) : 0);
    if (!(total > 0)) continue;
    for (int e = 0; e < store.size(); ++e) {
      own[static_cast<size_t>(h * mass_stride + e)] =
          static_cast<float>(row[store.position(e)] / total);
    }
  }
  reduce_row(shape, own.data(), mass_stride, mass_stride, layout, reduced);
  std::copy(reduced.begin(), reduced.end(), mass);
}

}  // namespace kvreplay::replay
