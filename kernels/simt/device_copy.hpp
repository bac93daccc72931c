// Copies of a cache's heads as the device's kernels see them, for tests on the emulator: aligned
// rows, room for more entries, poison beyond the lengths.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include "kernels/device_storage.cuh"
#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels::testing {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// x, then `poison` up to `room` values; starts at a multiple of 16 bytes.
template <class T>
class device_array {
 public:
  device_array(const std::vector<T>& x, std::size_t room, T poison) {
    room = std::max(room, x.size());
    blocks_.resize(room * sizeof(T) / 16 + 1);
    for (std::size_t i = 0; i < room; ++i) get()[i] = i < x.size() ? x[i] : poison;
  }
  T* get() { return reinterpret_cast<T*>(blocks_.data()); }

 private:
  struct alignas(16) block {
    std::uint8_t bytes[16];
  };
  std::vector<block> blocks_;
};

// One head with room for `spare` more entries in each tier. Not to be copied: storage points
// inside.
class head_copy {
 public:
  head_copy(const head_store& s, const cache_shape& shape, int spare)
      : body_room_(at((s.body_size() + spare + 15) / 16 * 16)),
        tail_room_(at(s.tail_size() + spare)),
        body_k_(s.body_k, body_room_ * at(shape.head_dim), 99),
        body_v_(s.body_v, body_room_ * at(shape.value_dim), 99),
        tail_k_(s.tail_k, tail_room_ * at(shape.head_dim), half_nan),
        tail_v_(s.tail_v, tail_room_ * at(shape.value_dim), half_nan),
        body_k_scale_(s.body_k_scale, body_room_, half_nan),
        body_v_scale_(s.body_v_scale, body_room_, half_nan),
        body_position_(s.body_position, body_room_, -7),
        tail_position_(s.tail_position, tail_room_, -7),
        body_score_(s.body_score, body_room_, nan),
        tail_score_(s.tail_score, tail_room_, nan) {
    storage.body_k = body_k_.get();
    storage.body_v = body_v_.get();
    storage.body_k_scale = body_k_scale_.get();
    storage.body_v_scale = body_v_scale_.get();
    storage.body_position = body_position_.get();
    storage.body_score = body_score_.get();
    storage.tail_k = tail_k_.get();
    storage.tail_v = tail_v_.get();
    storage.tail_position = tail_position_.get();
    storage.tail_score = tail_score_.get();
    storage.k_channel_scale = s.k_channel_scale.empty() ? nullptr : s.k_channel_scale.data();
    storage.v_channel_scale = s.v_channel_scale.empty() ? nullptr : s.v_channel_scale.data();
    storage.body = s.body_size();
    storage.tail = s.tail_size();
    storage.body_capacity = static_cast<int>(body_room_);
    storage.tail_capacity = static_cast<int>(tail_room_);
  }
  head_copy(head_copy&&) = default;  // vectors keep their memory when moved
  head_copy(const head_copy&) = delete;

  device::head_storage storage;

 private:
  static constexpr std::uint16_t half_nan = 0x7e00;
  static constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  std::size_t body_room_, tail_room_;
  device_array<std::int8_t> body_k_, body_v_;
  device_array<std::uint16_t> tail_k_, tail_v_, body_k_scale_, body_v_scale_;
  device_array<std::int32_t> body_position_, tail_position_;
  device_array<float> body_score_, tail_score_;
};

// One stored entry, for comparisons that do not depend on slots.
struct stored_entry {
  bool body = false;
  std::vector<int> k, v;  // codes or half bits
  int k_scale = 0, v_scale = 0;
  float score = 0;
  bool operator==(const stored_entry&) const = default;
};

// Entries by position.
template <class Store>
std::map<std::int32_t, stored_entry> entries_of(const Store& s, int body, int tail,
                                                const cache_shape& shape) {
  std::map<std::int32_t, stored_entry> all;
  const auto row = [](const auto& rows, int i, int dim) {
    std::vector<int> out;
    for (int c = 0; c < dim; ++c) out.push_back(rows[at(std::int64_t{i} * dim + c)]);
    return out;
  };
  for (int i = 0; i < body; ++i) {
    all[s.body_position[at(i)]] = {true,
                                   row(s.body_k, i, shape.head_dim),
                                   row(s.body_v, i, shape.value_dim),
                                   s.body_k_scale[at(i)],
                                   s.body_v_scale[at(i)],
                                   s.body_score[at(i)]};
  }
  for (int i = 0; i < tail; ++i) {
    all[s.tail_position[at(i)]] = {false,
                                   row(s.tail_k, i, shape.head_dim),
                                   row(s.tail_v, i, shape.value_dim),
                                   0,
                                   0,
                                   s.tail_score[at(i)]};
  }
  return all;
}
inline std::map<std::int32_t, stored_entry> entries_of(const head_store& s,
                                                       const cache_shape& shape) {
  return entries_of(s, s.body_size(), s.tail_size(), shape);
}
inline std::map<std::int32_t, stored_entry> entries_of(const device::head_storage& s,
                                                       const cache_shape& shape) {
  return entries_of(s, s.body, s.tail, shape);
}

}  // namespace kvreplay::kernels::testing
