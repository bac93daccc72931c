#include "replay/future_mass.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace kvreplay::replay {
namespace {

constexpr double one = 0x1p40;        // a probability of 1 in fixed point
constexpr std::int64_t at_once = 16;  // rows

}  // namespace

future_mass::future_mass(const kernels::cache_shape& shape, const layer_data& data,
                         std::span<const kernels::mass_layout> layouts)
    : shape_(&shape), data_(&data) {
  const auto size = static_cast<size_t>(shape.kv_heads * data.n_tokens);
  for (const auto layout : layouts) by_layout_[layout].left.assign(size, 0);
  add_rows(data.n_prompt, data.n_tokens - data.n_prompt, 1);
  load(data.n_prompt, 0);
}

// Adds the reduced rows of the steps to what is left, or takes them off it and keeps what remains
// after each.
void future_mass::add_rows(std::int64_t first, std::int64_t steps, std::int64_t sign) {
  std::vector<float> rows, reduced;
  for (std::int64_t s = 0; s < steps; s += at_once) {
    const std::int64_t n = std::min(at_once, steps - s), stride = first + s + n;
    rows.resize(static_cast<size_t>(n * shape_->q_heads * stride));
    full_rows_of(*shape_, *data_, first + s, n, stride, rows.data());
    for (auto& [layout, sum] : by_layout_) {
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t t = first + s + i;
        reduce_row(*shape_, &rows[static_cast<size_t>(i * shape_->q_heads * stride)], stride, t + 1,
                   layout, reduced);
        for (int g = 0; g < shape_->kv_heads; ++g) {
          std::int64_t* left = &sum.left[static_cast<size_t>(g * data_->n_tokens)];
          const float* mass = &reduced[static_cast<size_t>(g * (t + 1))];
          for (std::int64_t p = 0; p <= t; ++p) left[p] += sign * std::llround(mass[p] * one);
          if (sign > 0) continue;
          float* out = &sum.rows[static_cast<size_t>(((t - first_ + 1) * shape_->kv_heads + g) *
                                                     (first_ + steps_))];
          for (std::int64_t p = 0; p <= t; ++p)
            out[p] = static_cast<float>(static_cast<double>(left[p]) / one);
        }
      }
    }
  }
}

void future_mass::load(std::int64_t first, std::int64_t steps) {
  first_ = first;
  steps_ = steps;
  const std::int64_t stride = first + steps;
  for (auto& [layout, sum] : by_layout_) {
    sum.rows.assign(static_cast<size_t>((steps + 1) * shape_->kv_heads * stride), 0.0F);
    for (int g = 0; g < shape_->kv_heads; ++g) {
      const std::int64_t* left = &sum.left[static_cast<size_t>(g * data_->n_tokens)];
      float* out = &sum.rows[static_cast<size_t>(g * stride)];
      for (std::int64_t p = 0; p < first; ++p)
        out[p] = static_cast<float>(static_cast<double>(left[p]) / one);
    }
  }
  add_rows(first, steps, -1);
}

std::span<const float> future_mass::row(std::int64_t step, kernels::mass_layout layout,
                                        int kv_head) const {
  const auto at = by_layout_.find(layout);
  if (at == by_layout_.end() || step < first_ - 1 || step >= first_ + steps_) {
    throw std::logic_error(fmt::format("future mass: step {} is not loaded", step));
  }
  const std::int64_t stride = first_ + steps_;
  const std::int64_t begin = ((step - first_ + 1) * shape_->kv_heads + kv_head) * stride;
  return {&at->second.rows[static_cast<size_t>(begin)], static_cast<size_t>(step + 1)};
}

}  // namespace kvreplay::replay
