#include "kernels/kv_cache.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace kvreplay::kernels {
namespace {

constexpr int max_dim = 256;
constexpr int most_in_page = 1 << 16;

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
  if (f.page < 0 || f.page > most_in_page || (f.page & (f.page - 1)) != 0) {
    refuse(fmt::format("page is {}, expected 0 (contiguous) or a power of two up to {}", f.page,
                       most_in_page));
  }
  if (f.body == body_format::none) return;
  if (!std::isfinite(f.static_margin) || f.static_margin <= 0) {
    refuse(fmt::format("static_margin is {}, expected a positive number", f.static_margin));
  }
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
  widths_ = row_widths(shape_, format_);
  const auto layers = static_cast<std::size_t>(shape_.layers);
  heads_.resize(layers * static_cast<std::size_t>(shape_.kv_heads));
  if (format_.page > 0) pools_.resize(layers);
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

const payload_rows& kv_cache::payload(int layer, int kv_head) const {
  const head_store& store = head(layer, kv_head);
  if (pools_.empty()) return store;
  return pools_[static_cast<std::size_t>(layer)].rows;
}

payload_rows& kv_cache::payload(int layer, int kv_head) {
  return const_cast<payload_rows&>(std::as_const(*this).payload(layer, kv_head));
}

row_pages kv_cache::rows_of(int layer, int kv_head, tier t) const {
  if (pools_.empty()) return {};
  const head_store& store = head(layer, kv_head);
  return {(t == tier::tail ? store.tail_pages : store.body_pages).data(),
          std::countr_zero(static_cast<unsigned>(format_.page))};
}

void kv_cache::resize_payload(int layer, int kv_head, tier t, std::int64_t n) {
  head_store& store = head(layer, kv_head);
  if (pools_.empty()) {
    resize_rows(store, widths_, t, n);
    return;
  }
  std::vector<std::int32_t>& pages = t == tier::tail ? store.tail_pages : store.body_pages;
  page_pool& pool = pools_[static_cast<std::size_t>(layer)];
  const auto wanted = static_cast<std::size_t>((n + format_.page - 1) / format_.page);
  while (pages.size() < wanted) pages.push_back(pool.take(widths_, t, format_.page));
  while (pages.size() > wanted) {
    pool.give_back(t, pages.back());
    pages.pop_back();
  }
}

const std::vector<std::int32_t>& kv_cache::free_pages(int layer, tier t) const {
  return pools_.at(static_cast<std::size_t>(layer)).free_pages(t);
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
    total +=
        kernels::payload_bytes(shape_, format_, store.tail_size(), store.body_size(), store.groups);
  }
  return total;
}

std::int64_t kv_cache::payload_bytes() const {
  std::int64_t total = 0;
  for (int layer = 0; layer < shape_.layers; ++layer) total += payload_bytes(layer);
  return total;
}

std::int64_t kv_cache::state_bytes(int layer) const {
  constexpr std::int64_t word = sizeof(std::int32_t);
  static_assert(word == sizeof(float));
  std::int64_t words = 0;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    words += 2 * std::int64_t{entries(layer, h)} +
             static_cast<std::int64_t>(head(layer, h).body_group.size());
  }
  return words * word;
}

std::int64_t kv_cache::reserved_bytes() const {
  std::int64_t total = 0;
  for (const head_store& s : heads_) {
    total += capacity_bytes(s.k_channel_scale) + capacity_bytes(s.v_channel_scale) +
             capacity_bytes(s.group_k_scale) + capacity_bytes(s.group_k_zero) +
             capacity_bytes(s.group_v_scale);
    for (const tier t : {tier::tail, tier::body}) {
      const auto pages = (t == tier::tail ? s.tail_pages : s.body_pages).size();
      total += static_cast<std::int64_t>(pages) * format_.page * widths_.bytes(t);
      for_each_array(static_cast<const payload_rows&>(s), widths_, t,
                     [&total](const auto& array, std::int64_t) { total += capacity_bytes(array); });
    }
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

bool has_channel_table(const storage_format& f) {
  return f.body == body_format::int8 && f.scales != scale_format::token &&
         f.scales != scale_format::group;
}

std::int64_t payload_bytes(const cache_shape& shape, const storage_format& format,
                           std::int64_t tail, std::int64_t body, std::int64_t groups) {
  const row_widths widths(shape, format);
  const std::int64_t channels = shape.head_dim + shape.value_dim;
  const std::int64_t table = has_channel_table(format) ? 4 * channels : 0;
  // FP16, keys: a scale (int4: and a zero point); values: a scale (int4: none, they are the rows').
  const std::int64_t group =
      format.body == body_format::int4 ? 2 * 2 * std::int64_t{shape.head_dim} : 2 * channels;
  return tail * widths.bytes(tier::tail) + body * widths.bytes(tier::body) + groups * group + table;
}

}  // namespace kvreplay::kernels
