#include "replay/full_lane.hpp"

#include <algorithm>
#include <utility>

namespace kvreplay::replay {

full_lane::full_lane(kernels::cache_shape shape, std::int64_t n_tokens) : shape_(std::move(shape)) {
  const auto values = [&](int dim) {
    return static_cast<size_t>(n_tokens * shape_.kv_heads * std::int64_t{dim});
  };
  k_.assign(static_cast<size_t>(shape_.layers), std::vector<float>(values(shape_.head_dim)));
  v_.assign(static_cast<size_t>(shape_.layers), std::vector<float>(values(shape_.value_dim)));
}

tracer::full_attention_shape full_lane::shape_of(int layer) const {
  return {shape_.q_heads,   shape_.kv_heads,      shape_.head_dim,
          shape_.value_dim, shape_.softmax_scale, shape_.window_of(layer)};
}

void full_lane::attend(int layer, std::int64_t first, std::int64_t rows, const float* q,
                       const float* k, const float* v, float* o, std::vector<float>& lse) {
  const std::int64_t k_width = std::int64_t{shape_.kv_heads} * shape_.head_dim;
  const std::int64_t v_width = std::int64_t{shape_.kv_heads} * shape_.value_dim;
  auto& keys = k_[static_cast<size_t>(layer)];
  auto& values = v_[static_cast<size_t>(layer)];
  std::copy_n(k, rows * k_width, keys.begin() + first * k_width);
  std::copy_n(v, rows * v_width, values.begin() + first * v_width);
  lse.resize(static_cast<size_t>(rows * shape_.q_heads));
  tracer::full_attention(shape_of(layer), first, rows, q, keys.data(), values.data(), o,
                         lse.data());
}

}  // namespace kvreplay::replay
