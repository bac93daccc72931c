// cache_on_device: loading and saving layers, room for more entries, and faults in the host's
// words.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>

#include "kernels/cache_on_device.cuh"

namespace kvreplay::kernels::device {

inline std::string text_of(float x) {
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, x);
  return {digits, end.ptr};
}

inline std::size_t cache_on_device::index(int layer, int kv_head) const {
  if (layer < 0 || layer >= shape_.layers || kv_head < 0 || kv_head >= shape_.kv_heads) {
    throw std::out_of_range("device_cache: a layer or KV head is out of range");
  }
  return static_cast<std::size_t>(layer) * static_cast<std::size_t>(shape_.kv_heads) +
         static_cast<std::size_t>(kv_head);
}

inline std::string cache_on_device::place_of(const char* operation, int layer, int kv_head,
                                             std::int32_t position) const {
  return std::string(operation)
      .append(": layer ")
      .append(std::to_string(layer))
      .append(", head ")
      .append(std::to_string(kv_head))
      .append(", position ")
      .append(std::to_string(position));
}

inline void cache_on_device::fetch_storage(int layer) {
  const auto mirror = mirror_of(layer);
  copy_async(mirror.data(), on_device(layer, 0), mirror.size_bytes(), stream_.get());
  stream_.wait();
  selecting_ = false;
  check_faults(layer, nullptr);
}

inline void cache_on_device::send_storage(int layer) {
  const auto mirror = mirror_of(layer);
  copy_async(on_device(layer, 0), mirror.data(), mirror.size_bytes(), stream_.get());
  stream_.wait();
}

inline void cache_on_device::load(int layer, std::span<const head_store> heads) {
  const auto mirror = mirror_of(layer);
  if (heads.size() != mirror.size()) {
    throw std::invalid_argument("device_cache: load takes one store for every KV head");
  }
  head_room room;
  for (const head_store& h : heads) {
    if (!h.tail_k32.empty()) throw std::invalid_argument("device_cache: the tail is not FP16");
    if (format_.body != body_format::none) room.body = std::max(room.body, h.size());
    room.tail = std::max(room.tail, h.tail_size());
  }
  stream_.wait();
  auto& arena = arenas_[static_cast<std::size_t>(layer)];
  room = {room.body + room.body / 4, room.tail + room.tail / 4 + 64};
  if (format_.body != body_format::none) room.body += 64;
  arena = std::make_unique<layer_arena>(room, shape_.kv_heads, shape_.head_dim, shape_.value_dim);
  std::int32_t newest = std::numeric_limits<std::int32_t>::min();
  const auto up = [this](auto* to, const auto& from, std::int64_t n) {
    copy_async(to, from.data(), static_cast<std::size_t>(n) * sizeof(from[0]), stream_.get());
  };
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const head_store& from = heads[static_cast<std::size_t>(h)];
    head_storage& s = mirror[static_cast<std::size_t>(h)];
    s = arena->storage(h);
    s.body = from.body_size();
    s.tail = from.tail_size();
    each_array(s, from, shape_, up);
    if (!from.k_channel_scale.empty()) {
      up(arena->k_channel(h), from.k_channel_scale, shape_.head_dim);
      up(arena->v_channel(h), from.v_channel_scale, shape_.value_dim);
      s.k_channel_scale = arena->k_channel(h);
      s.v_channel_scale = arena->v_channel(h);
    }
    held_[index(layer, h)] = from.size();
    for (int e = 0; e < from.size(); ++e) newest = std::max(newest, from.position(e));
  }
  newest_[static_cast<std::size_t>(layer)] = newest;
  aged_[static_cast<std::size_t>(layer)] = 0;
  send_storage(layer);
}

inline void cache_on_device::save(int layer, std::span<head_store> heads) {
  const auto mirror = mirror_of(layer);
  if (heads.size() != mirror.size()) {
    throw std::invalid_argument("device_cache: save takes one store for every KV head");
  }
  fetch_storage(layer);
  const auto down = [this](const auto* from, auto& to, std::int64_t n) {
    to.resize(static_cast<std::size_t>(n));
    copy_async(to.data(), from, to.size() * sizeof(to[0]), stream_.get());
  };
  for (std::size_t h = 0; h < heads.size(); ++h) {
    each_array(mirror[h], heads[h], shape_, down);
    const bool table = mirror[h].k_channel_scale != nullptr;
    down(mirror[h].k_channel_scale, heads[h].k_channel_scale, table ? shape_.head_dim : 0);
    down(mirror[h].v_channel_scale, heads[h].v_channel_scale, table ? shape_.value_dim : 0);
  }
  stream_.wait();
}

// The entries move to arrays with at least this room.
inline void cache_on_device::grow(int layer, const head_room& room) {
  fetch_storage(layer);
  auto& arena = arenas_[static_cast<std::size_t>(layer)];
  auto larger =
      std::make_unique<layer_arena>(room, shape_.kv_heads, shape_.head_dim, shape_.value_dim);
  for (int h = 0; h < shape_.kv_heads; ++h) {
    head_storage& s = mirror_[index(layer, h)];
    head_storage next = larger->storage(h);
    next.body = s.body;
    next.tail = s.tail;
    next.fault = s.fault;
    next.quantised = s.quantised;
    copy_entries(s, next, shape_, stream_.get());
    if (s.k_channel_scale != nullptr) {
      next.k_channel_scale = larger->k_channel(h);
      next.v_channel_scale = larger->v_channel(h);
      copy_async(larger->k_channel(h), s.k_channel_scale, sizeof(float) * shape_.head_dim,
                 stream_.get());
      copy_async(larger->v_channel(h), s.v_channel_scale, sizeof(float) * shape_.value_dim,
                 stream_.get());
    }
    s = next;
  }
  send_storage(layer);
  arena = std::move(larger);
}

inline head_room cache_on_device::bound_of(const device_step& item, int kv_head) const {
  const std::size_t at = index(item.layer, kv_head);
  const head_storage& s = mirror_[at];
  const int held = held_[at] + 1;
  if (format_.body == body_format::none) return {0, std::min(held, s.tail + 1)};
  // Since the last step only the positions between its threshold and this one's have come of age.
  const std::int64_t passed =
      std::int64_t{item.position} - newest_[static_cast<std::size_t>(item.layer)];
  const bool known = aged_[static_cast<std::size_t>(item.layer)] != 0 && passed < s.tail;
  const int aging = known ? static_cast<int>(passed) : s.tail;
  return {std::min(held, s.body + aging), std::min(held, s.tail + 1)};
}

inline void cache_on_device::make_room(const device_step& item) {
  head_room needed;
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const head_room bound = bound_of(item, h);
    needed.body = std::max(needed.body, bound.body);
    needed.tail = std::max(needed.tail, bound.tail);
  }
  const head_room& have = arenas_[static_cast<std::size_t>(item.layer)]->room();
  if (needed.body <= have.body && needed.tail <= have.tail) return;
  const auto grown = [](int need, int had) { return need <= had ? had : need + need / 2 + 64; };
  grow(item.layer, {grown(needed.body, have.body), grown(needed.tail, have.tail)});
}

// The first head of the layer with a fault, in the words of the host's operations. `item`: the step
// that ran, or null.
inline void cache_on_device::check_faults(int layer, const device_step* item) {
  for (int h = 0; h < shape_.kv_heads; ++h) {
    const head_storage& s = mirror_[index(layer, h)];
    if (s.fault == 0) continue;
    if ((s.fault & fault_no_room) != 0) {
      throw std::logic_error("device_cache: a tier is full although room was made");
    }
    if ((s.fault & fault_score_is_nan) != 0) {
      throw std::domain_error(place_of("select", layer, h, bad_entry(s)).append(": score is nan"));
    }
    if ((s.fault & fault_mass) != 0) {
      throw std::domain_error(
          place_of("update_scores", layer, h, bad_entry(s)).append(": mass is not a number"));
    }
    if (item != nullptr) check_newcomer(*item, h);
    const std::int32_t newest =
        item != nullptr ? item->position - 1 : newest_[static_cast<std::size_t>(layer)];
    throw std::domain_error(
        place_of("quantise", layer, h, aging_entry(s, newest))
            .append((s.fault & fault_no_table) != 0 ? ": the channel scales are not known yet"
                    : (s.fault & fault_scale_range) != 0
                        ? ": the row is too large for a float16 scalar over the calibrated channel "
                          "scales"
                        : ": the row is not finite"));
  }
}

// Throws as append does on the host for the first value that FP16 cannot hold.
inline void cache_on_device::check_newcomer(const device_step& item, int kv_head) const {
  const auto check = [&](const char* what, const float* rows, int n) {
    const float* row = rows + std::int64_t{kv_head} * n;
    for (int c = 0; c < n; ++c) {
      if (row[c] < 65520.0F && row[c] > -65520.0F) continue;
      throw std::invalid_argument(place_of("append", item.layer, kv_head, item.position)
                                      .append(": ")
                                      .append(what)
                                      .append(" channel ")
                                      .append(std::to_string(c))
                                      .append(" is ")
                                      .append(text_of(row[c]))
                                      .append(", expected a finite value within the range of "
                                              "float16"));
    }
  };
  check("k", item.k, shape_.head_dim);
  check("v", item.v, shape_.value_dim);
}

template <class T>
std::vector<T> cache_on_device::read(const T* from, int n) const {
  std::vector<T> x(static_cast<std::size_t>(n));
  copy_async(x.data(), from, x.size() * sizeof(T), stream_.get());
  wait_for(stream_.get());
  return x;
}

// The position of the first entry whose score is no number; -1: it has left meanwhile.
inline std::int32_t cache_on_device::bad_entry(const head_storage& s) const {
  const auto find = [this](const float* scores, const std::int32_t* positions, int n) {
    const auto values = read(scores, n);
    const auto at = std::find_if(values.begin(), values.end(),
                                 [](float x) { return !(std::fabs(x) <= 3.40282347e38F); });
    return at == values.end() ? std::int32_t{-1} : read(positions + (at - values.begin()), 1)[0];
  };
  const std::int32_t in_body = find(s.body_score, s.body_position, s.body);
  return in_body >= 0 ? in_body : find(s.tail_score, s.tail_position, s.tail);
}

// The position at which ageing stopped: it goes from the tail's end.
inline std::int32_t cache_on_device::aging_entry(const head_storage& s, std::int32_t step) const {
  const auto positions = read(s.tail_position, s.tail);
  for (auto p = positions.rbegin(); p != positions.rend(); ++p) {
    if (*p <= step - format_.tail_window && *p >= format_.tail_sinks) return *p;
  }
  return -1;
}

}  // namespace kvreplay::kernels::device
