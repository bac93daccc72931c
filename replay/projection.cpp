#include "replay/projection.hpp"

#include <cmath>

#include "tracer/linear.hpp"

namespace kvreplay::replay {

std::vector<float> output_weights(const projection_shape& shape, std::span<const float> wo) {
  const auto inputs = static_cast<size_t>(shape.q_heads) * static_cast<size_t>(shape.value_dim);
  const auto outputs = static_cast<size_t>(shape.hidden_size);
  std::vector<float> out(wo.size());
  for (size_t i = 0; i < inputs; ++i) {
    for (size_t j = 0; j < outputs; ++j) out[j * inputs + i] = wo[i * outputs + j];
  }
  return out;
}

std::vector<projected_row> project(const projection_shape& shape, std::span<const float> weights,
                                   std::span<const float> x, std::int64_t rows) {
  const std::int64_t inputs = std::int64_t{shape.q_heads} * shape.value_dim;
  const auto hidden = static_cast<size_t>(shape.hidden_size);
  const auto n = static_cast<size_t>(rows);
  std::vector<float> head(n * hidden), total(n * hidden, 0.0F);
  std::vector<projected_row> out(n);
  for (int h = 0; h < shape.q_heads; ++h) {
    const std::int64_t first = std::int64_t{h} * shape.value_dim;
    const tracer::linear_view slice{shape.hidden_size, shape.value_dim, weights.data() + first,
                                    nullptr, inputs};
    tracer::apply_linear(slice, x.data() + first, rows, head.data(), inputs);
    for (size_t r = 0; r < n; ++r) {
      double sum = 0;
      for (size_t c = 0; c < hidden; ++c) {
        const float y = head[r * hidden + c];
        sum += std::fabs(y);
        total[r * hidden + c] += y;
      }
      out[r].head_l1_sum += sum;
    }
  }
  for (size_t r = 0; r < n; ++r) {
    for (size_t c = 0; c < hidden; ++c) {
      const double y = total[r * hidden + c];
      out[r].norm2 += y * y;
      out[r].l1 += std::fabs(y);
    }
  }
  return out;
}

}  // namespace kvreplay::replay
