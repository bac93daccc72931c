#include "replay/projection.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/inner_loops.hpp"

namespace kvreplay::replay {
namespace {

constexpr int tile = 16;  // outputs of inner_loops.hpp's score_tile

int tiles_of(const projection_shape& shape) { return (shape.hidden_size + tile - 1) / tile; }

// x [rows, q_heads, value_dim] -> [q_heads, rows, value_dim]
std::vector<float> by_head(const projection_shape& shape, std::span<const float> x,
                           std::int64_t rows) {
  std::vector<float> out(x.size());
  const auto dim = static_cast<std::int64_t>(shape.value_dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t h = 0; h < shape.q_heads; ++h) {
      std::copy_n(&x[static_cast<size_t>((r * shape.q_heads + h) * dim)], dim,
                  &out[static_cast<size_t>((h * rows + r) * dim)]);
    }
  }
  return out;
}

double sum_of_magnitudes(const float* y) {
  double sum[4] = {};
  for (int c = 0; c < tile; ++c) sum[c % 4] += static_cast<double>(std::fabs(y[c]));
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

}  // namespace

std::vector<float> output_weights(const projection_shape& shape, std::span<const float> wo) {
  const auto inputs = static_cast<size_t>(shape.q_heads) * static_cast<size_t>(shape.value_dim);
  const auto outputs = static_cast<size_t>(shape.hidden_size);
  std::vector<float> out(static_cast<size_t>(tiles_of(shape)) * inputs * tile, 0.0F);
  for (size_t i = 0; i < inputs; ++i) {
    for (size_t j = 0; j < outputs; ++j) {
      out[(j / tile * inputs + i) * tile + j % tile] = wo[i * outputs + j];
    }
  }
  return out;
}

std::vector<projected_row> project(const projection_shape& shape, std::span<const float> weights,
                                   std::span<const float> x, std::int64_t rows) {
  const auto& loops = kernels::active_loops();
  const std::int64_t dim = shape.value_dim;
  const auto n = static_cast<size_t>(rows);
  const auto heads = by_head(shape, x, rows);
  std::vector<projected_row> out(n);
  for (auto& row : out) row.head_l1.assign(static_cast<size_t>(shape.q_heads), 0.0);
  std::vector<float> one(n * tile), total(n * tile);
  for (int j = 0; j < tiles_of(shape); ++j) {
    std::fill(total.begin(), total.end(), 0.0F);
    for (std::int64_t h = 0; h < shape.q_heads; ++h) {
      const float* w = &weights[static_cast<size_t>((j * shape.q_heads + h) * dim * tile)];
      loops.score_tile(&heads[static_cast<size_t>(h * rows * dim)], rows, w, shape.value_dim,
                       one.data(), tile);
      for (size_t r = 0; r < n; ++r) {
        const float* y = &one[r * tile];
        out[r].head_l1[static_cast<size_t>(h)] += sum_of_magnitudes(y);
        for (size_t c = 0; c < tile; ++c) total[r * tile + c] += y[c];
      }
    }
    for (size_t r = 0; r < n; ++r) {
      const float* y = &total[r * tile];
      out[r].l1 += sum_of_magnitudes(y);
      for (int c = 0; c < tile; ++c) {
        out[r].norm2 += static_cast<double>(y[c]) * static_cast<double>(y[c]);
      }
    }
  }
  return out;
}

std::vector<float> value_norms(const projection_shape& shape, std::span<const float> weights,
                               int kv_heads, std::span<const float> v, std::int64_t rows) {
  const auto& loops = kernels::active_loops();
  const std::int64_t dim = shape.value_dim, group = shape.q_heads / kv_heads;
  const auto heads = by_head({kv_heads, shape.value_dim, shape.hidden_size}, v, rows);
  std::vector<double> sums(static_cast<size_t>(rows * shape.q_heads), 0.0);
  std::vector<float> one(static_cast<size_t>(rows * tile));
  for (int j = 0; j < tiles_of(shape); ++j) {
    for (std::int64_t h = 0; h < shape.q_heads; ++h) {
      const float* w = &weights[static_cast<size_t>((j * shape.q_heads + h) * dim * tile)];
      loops.score_tile(&heads[static_cast<size_t>(h / group * rows * dim)], rows, w,
                       shape.value_dim, one.data(), tile);
      for (std::int64_t r = 0; r < rows; ++r) {
        sums[static_cast<size_t>(r * shape.q_heads + h)] +=
            sum_of_magnitudes(&one[static_cast<size_t>(r * tile)]);
      }
    }
  }
  return {sums.begin(), sums.end()};
}

}  // namespace kvreplay::replay
