#include "kernels/kv_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace kvreplay::kernels {
namespace {

constexpr int max_dim = 256;

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("kv_cache: " + what);
}

void check_shape(const cache_shape& s) {
  if (s.layers < 1) refuse(fmt::format("layers is {}, expected at least 1", s.layers));
  if (s.kv_heads < 1 || s.q_heads < 1 || s.q_heads % s.kv_heads != 0) {
    refuse(fmt::format("{} query heads over {} KV heads, expected a positive multiple", s.q_heads,
                       s.kv_heads));
  }
  for (const auto& [name, dim] : {std::pair{"head_dim", s.head_dim}, {"value_dim", s.value_dim}}) {
    if (dim < 1 || dim > max_dim) {
      refuse(fmt::format("{} is {}, expected 1 .. {}", name, dim, max_dim));
    }
  }
  if (!std::isfinite(s.softmax_scale)) refuse("softmax_scale is not finite");
  if (s.rope != rope_pairing::none) {
    const int rotated = s.rope_dim == 0 ? s.head_dim : s.rope_dim;
    if (rotated < 2 || rotated > s.head_dim || rotated % 2 != 0) {
      refuse(fmt::format("rope_dim is {}, expected an even number up to head_dim {}", rotated,
                         s.head_dim));
    }
  }
}

void check_per_layer(const cache_shape& s) {
  const auto layers = static_cast<std::size_t>(s.layers);
  if (!s.window.empty() && s.window.size() != layers) {
    refuse(fmt::format("{} windows for {} layers", s.window.size(), layers));
  }
  for (const int w : s.window) {
    if (w < 0) refuse(fmt::format("window is {}, expected 0 (global) or more", w));
  }
  const std::size_t sinks = layers * static_cast<std::size_t>(s.q_heads);
  if (!s.sink_logits.empty() && s.sink_logits.size() != sinks) {
    refuse(
        fmt::format("{} sink logits, expected layers x q_heads = {}", s.sink_logits.size(), sinks));
  }
  for (const float x : s.sink_logits) {
    if (!std::isfinite(x)) refuse("a sink logit is not finite");
  }
}

void check_format(const storage_format& f) {
  if (f.tail_window < 0) refuse(fmt::format("tail_window is {}, expected >= 0", f.tail_window));
  if (f.tail_sinks < 0) refuse(fmt::format("tail_sinks is {}, expected >= 0", f.tail_sinks));
  if (f.body == body_format::none) return;
  if (f.body == body_format::int4) refuse("int4 is not implemented by this back end");
  if (f.scales == scale_format::group) refuse("group scales are not implemented by this back end");
  if (!std::isfinite(f.static_margin) || f.static_margin <= 0) {
    refuse(fmt::format("static_margin is {}, expected a positive number", f.static_margin));
  }
}

bool has_channel_table(const storage_format& f) {
  return f.body != body_format::none && f.scales != scale_format::token;
}

bool has_entry_scales(const storage_format& f) {
  return f.scales == scale_format::hybrid || f.scales == scale_format::token;
}

template <class T>
std::int64_t capacity_bytes(const std::vector<T>& v) {
  return static_cast<std::int64_t>(v.capacity() * sizeof(T));
}

}  // namespace

kv_cache::kv_cache(cache_shape shape, storage_format format)
    : shape_(std::move(shape)), format_(format) {
  check_shape(shape_);
  check_per_layer(shape_);
  check_format(format_);
  const auto layers = static_cast<std::size_t>(shape_.layers);
  heads_.resize(layers * static_cast<std::size_t>(shape_.kv_heads));
  events_.resize(layers);
}

const head_store& kv_cache::head(int layer, int kv_head) const {
  if (layer < 0 || layer >= shape_.layers || kv_head < 0 || kv_head >= shape_.kv_heads) {
    throw std::out_of_range(fmt::format("kv_cache: layer {}, head {} of {} layers, {} KV heads",
                                        layer, kv_head, shape_.layers, shape_.kv_heads));
  }
  return heads_[static_cast<std::size_t>(layer) * static_cast<std::size_t>(shape_.kv_heads) +
                static_cast<std::size_t>(kv_head)];
}

head_store& kv_cache::head(int layer, int kv_head) {
  return const_cast<head_store&>(std::as_const(*this).head(layer, kv_head));
}

int kv_cache::max_entries(int layer) const {
  int most = 0;
  for (int h = 0; h < shape_.kv_heads; ++h) most = std::max(most, entries(layer, h));
  return most;
}

std::vector<std::int32_t> kv_cache::positions(int layer, int kv_head) const {
  const head_store& store = head(layer, kv_head);
  std::vector<std::int32_t> all = store.body_position;
  all.insert(all.end(), store.tail_position.begin(), store.tail_position.end());
  std::sort(all.begin(), all.end());
  return all;
}

std::int64_t kv_cache::payload_bytes(int layer) const {
  std::int64_t total = 0;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const head_store& store = head(layer, h);
    total += kernels::payload_bytes(shape_, format_, store.tail_size(), store.body_size());
  }
  return total;
}

std::int64_t kv_cache::payload_bytes() const {
  std::int64_t total = 0;
  for (int layer = 0; layer < shape_.layers; ++layer) total += payload_bytes(layer);
  return total;
}

std::int64_t kv_cache::state_bytes(int layer) const {
  std::int64_t held = 0;
  for (int h = 0; h < shape_.kv_heads; ++h) held += entries(layer, h);
  return held * static_cast<std::int64_t>(sizeof(std::int32_t) + sizeof(float));
}

std::int64_t kv_cache::reserved_bytes() const {
  std::int64_t total = 0;
  for (const head_store& s : heads_) {
    total += capacity_bytes(s.tail_k) + capacity_bytes(s.tail_v) + capacity_bytes(s.tail_k32) +
             capacity_bytes(s.tail_v32) + capacity_bytes(s.body_k) + capacity_bytes(s.body_v) +
             capacity_bytes(s.body_k_scale) + capacity_bytes(s.body_v_scale) +
             capacity_bytes(s.k_channel_scale) + capacity_bytes(s.v_channel_scale);
  }
  return total;
}

storage_events kv_cache::events() const {
  storage_events sum;
  for (const storage_events& e : events_) {
    sum.quantised += e.quantised;
    sum.requantised += e.requantised;
    sum.clipped += e.clipped;
  }
  return sum;
}

storage_events& kv_cache::events(int layer) {
  if (layer < 0 || layer >= shape_.layers) {
    throw std::out_of_range(fmt::format("kv_cache: layer {} of {} layers", layer, shape_.layers));
  }
  return events_[static_cast<std::size_t>(layer)];
}

std::int64_t payload_bytes(const cache_shape& shape, const storage_format& format,
                           std::int64_t tail, std::int64_t body) {
  const std::int64_t channels = shape.head_dim + shape.value_dim;
  const std::int64_t tail_value = format.tail == tail_format::fp16 ? 2 : 4;
  const std::int64_t scalars = has_entry_scales(format) ? 2 * 2 : 0;  // FP16, one for K, one for V
  const std::int64_t table = has_channel_table(format) ? 4 * channels : 0;
  return tail * tail_value * channels + body * (channels + scalars) + table;
}

}  // namespace kvreplay::kernels
