#include "kernels/append.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "kernels/inner_loops.hpp"
#include "kernels/select.hpp"

namespace kvreplay::kernels {
namespace {

struct span_of_positions {
  std::int32_t oldest = std::numeric_limits<std::int32_t>::max();
  std::int32_t newest = std::numeric_limits<std::int32_t>::min();
};

void widen(span_of_positions& s, const std::vector<std::int32_t>& positions) {
  for (const std::int32_t p : positions) {
    s.oldest = p < s.oldest ? p : s.oldest;
    s.newest = p > s.newest ? p : s.newest;
  }
}

span_of_positions held_positions(const head_store& store) {
  span_of_positions s;
  widen(s, store.body_position);
  widen(s, store.tail_position);
  return s;
}

// Throws for the first value that the tail cannot hold.
void check_row(const append_item& item, int head, std::string_view what, const float* row, int n) {
  const bool half = item.cache->format().tail == tail_format::fp16;
  // 65520 is the first magnitude that FP16 rounds to infinity.
  const float limit = half ? 65520.0F : std::numeric_limits<float>::infinity();
  std::uint32_t bad = 0;
  for (int c = 0; c < n; ++c) bad |= row[c] < limit && row[c] > -limit ? 0u : 1u;
  if (bad == 0) return;
  for (int c = 0; c < n; ++c) {
    if (row[c] < limit && row[c] > -limit) continue;
    throw std::invalid_argument(
        fmt::format("append: layer {}, head {}, position {}: {} channel {} is {}, expected a "
                    "finite value{}",
                    item.layer, head, item.position, what, c, row[c],
                    half ? " within the range of float16" : ""));
  }
}

void check_item(const append_item& item) {
  if (item.cache == nullptr || item.k == nullptr || item.v == nullptr) {
    throw std::invalid_argument("append: an item has no cache, no k or no v");
  }
  const cache_shape& shape = item.cache->shape();
  if (item.position < 0) {
    throw std::invalid_argument(
        fmt::format("append: layer {}: position {} is negative", item.layer, item.position));
  }
  for (int h = 0; h < shape.kv_heads; ++h) {
    const span_of_positions held = held_positions(item.cache->head(item.layer, h));
    if (held.newest >= item.position) {
      throw std::invalid_argument(
          fmt::format("append: layer {}, head {}, position {}: not newer than position {}, which "
                      "is held",
                      item.layer, h, item.position, held.newest));
    }
    check_row(item, h, "k", item.k + std::int64_t{h} * shape.head_dim, shape.head_dim);
    check_row(item, h, "v", item.v + std::int64_t{h} * shape.value_dim, shape.value_dim);
  }
}

void write_row(const float* row, std::int64_t n, std::int64_t at, std::vector<half_bits>& half,
               std::vector<float>& full, tail_format format) {
  if (format == tail_format::fp32) {
    std::copy_n(row, n, full.begin() + at * n);
  } else {
    active_loops().to_halves(row, n, half.data() + at * n);
  }
}

void append_entry(const append_item& item, int head) {
  kv_cache& cache = *item.cache;
  const cache_shape& shape = cache.shape();
  head_store& store = cache.head(item.layer, head);
  const int slot = store.tail_size();
  cache.resize_payload(item.layer, head, tier::tail, slot + 1);
  payload_rows& rows = cache.payload(item.layer, head);
  const std::int64_t at = row_of(cache.rows_of(item.layer, head, tier::tail), slot);
  write_row(item.k + std::int64_t{head} * shape.head_dim, shape.head_dim, at, rows.tail_k,
            rows.tail_k32, cache.format().tail);
  write_row(item.v + std::int64_t{head} * shape.value_dim, shape.value_dim, at, rows.tail_v,
            rows.tail_v32, cache.format().tail);
  store.tail_position.push_back(item.position);
  store.tail_score.push_back(unobserved_score);
}

// Entries that the model's own window has passed leave.
void drop_passed(kv_cache& cache, int layer, int head, std::int64_t newest_dropped) {
  const head_store& store = cache.head(layer, head);
  if (held_positions(store).oldest > newest_dropped) return;
  std::vector<std::uint8_t> keep(static_cast<std::size_t>(store.size()));
  for (int e = 0; e < store.size(); ++e) {
    keep[static_cast<std::size_t>(e)] = store.position(e) > newest_dropped ? 1 : 0;
  }
  compact(cache, layer, head, keep);
}

}  // namespace

void append(std::span<const append_item> items) {
  for (const append_item& item : items) {
    check_item(item);
    const cache_shape& shape = item.cache->shape();
    const int window = shape.window_of(item.layer);
    for (int h = 0; h < shape.kv_heads; ++h) {
      if (window > 0) drop_passed(*item.cache, item.layer, h, std::int64_t{item.position} - window);
      append_entry(item, h);
    }
  }
}

}  // namespace kvreplay::kernels
