#include "kernels/rerotate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "kernels/entry_rows.hpp"

namespace kvreplay::kernels {
namespace {

cache_shape one_layer(const cache_shape& shape, int layer) {
  cache_shape own = shape;
  own.layers = 1;
  own.window.clear();
  if (!shape.sink_logits.empty()) {
    const auto first = shape.sink_logits.begin() + std::ptrdiff_t{layer} * shape.q_heads;
    own.sink_logits.assign(first, first + shape.q_heads);
  }
  return own;
}

std::vector<int> order_of(const head_store& store) {
  std::vector<int> order(static_cast<std::size_t>(store.size()));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return store.position(a) < store.position(b); });
  return order;
}

void turn(const cache_shape& shape, std::span<const double> inv_freq, std::int64_t by,
          std::span<float> key) {
  const bool half = shape.rope == rope_pairing::half;
  for (std::size_t p = 0; p < inv_freq.size(); ++p) {
    const double angle = static_cast<double>(by) * inv_freq[p];
    const double c = std::cos(angle), s = std::sin(angle);
    float& first = key[half ? p : 2 * p];
    float& second = key[half ? p + inv_freq.size() : 2 * p + 1];
    const double a = first, b = second;
    first = static_cast<float>(a * c - b * s);
    second = static_cast<float>(a * s + b * c);
  }
}

}  // namespace

bool has_gaps(const kv_cache& cache, int layer) {
  for (int h = 0; h < cache.shape().kv_heads; ++h) {
    const head_store& store = cache.head(layer, h);
    if (store.size() == 0) continue;
    std::int32_t oldest = store.position(0), newest = oldest;
    for (int e = 1; e < store.size(); ++e) {
      oldest = std::min(oldest, store.position(e));
      newest = std::max(newest, store.position(e));
    }
    if (newest - oldest + 1 != store.size()) return true;
  }
  return false;
}

kv_cache rerotated(const kv_cache& cache, int layer, std::span<const double> inv_freq) {
  const cache_shape& shape = cache.shape();
  const int rotated = shape.rope_dim == 0 ? shape.head_dim : shape.rope_dim;
  if (shape.rope == rope_pairing::none ||
      inv_freq.size() != static_cast<std::size_t>(rotated / 2)) {
    throw std::invalid_argument(
        fmt::format("rerotate: layer {}: {} inverse frequencies for {} rotated channels", layer,
                    inv_freq.size(), shape.rope == rope_pairing::none ? 0 : rotated));
  }
  storage_format format;
  format.tail = tail_format::fp32;
  kv_cache out(one_layer(shape, layer), format);
  for (int h = 0; h < shape.kv_heads; ++h) {
    const head_store& from = cache.head(layer, h);
    head_store& to = out.head(0, h);
    const auto n = static_cast<std::size_t>(from.size());
    const auto dim = static_cast<std::size_t>(shape.head_dim);
    to.tail_k32 = entry_keys(cache, layer, h);
    to.tail_v32 = entry_values(cache, layer, h);
    to.tail_position.resize(n);
    to.tail_score.assign(n, unobserved_score);
    const std::vector<int> order = order_of(from);
    for (std::size_t rank = 0; rank < n; ++rank) {
      const auto e = static_cast<std::size_t>(order[rank]);
      const std::int64_t newest = from.position(order.back());
      const std::int64_t target = newest - static_cast<std::int64_t>(n - 1 - rank);
      to.tail_position[e] = static_cast<std::int32_t>(target);
      const std::int64_t by = target - from.position(order[rank]);
      if (by != 0) turn(shape, inv_freq, by, {&to.tail_k32[e * dim], dim});
    }
  }
  return out;
}

}  // namespace kvreplay::kernels
