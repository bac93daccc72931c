#include "replay/recorded_rows.hpp"

#include <algorithm>
#include <vector>

#include "kernels/prompt_mass.hpp"

namespace kvreplay::replay {

void for_each_row(const kernels::cache_shape& shape, const layer_data& data, std::int64_t first,
                  std::int64_t last, const std::function<void(const attention_rows&)>& visit) {
  constexpr std::int64_t most_bytes = std::int64_t{32} << 20;
  const std::int64_t row_bytes = last * shape.q_heads * std::int64_t{sizeof(float)};
  const std::int64_t block =
      std::clamp<std::int64_t>(most_bytes / std::max<std::int64_t>(1, row_bytes), 1, 64);
  std::vector<float> rows;
  for (std::int64_t t = first; t < last; t += block) {
    const std::int64_t steps = std::min(block, last - t), stride = t + steps;
    rows.resize(static_cast<std::size_t>(steps * shape.q_heads * stride));
    std::vector<float> lse(static_cast<std::size_t>(steps * shape.q_heads));
    const float* recorded =
        data.lse.empty()
            ? nullptr
            : &data.lse[static_cast<std::size_t>((t - data.first_row) * shape.q_heads)];
    kernels::full_rows(shape, 0, data.q_at(t), data.k.data(), recorded, t, steps, stride,
                       rows.data(), recorded == nullptr ? lse.data() : nullptr);
    for (std::int64_t i = 0; i < steps; ++i) {
      visit({t + i, stride, rows.data() + i * shape.q_heads * stride});
    }
  }
}

}  // namespace kvreplay::replay
