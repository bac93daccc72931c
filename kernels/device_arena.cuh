// Where the entries of a layer lie on the device: one allocation, the same layout for every KV
// head, room to grow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/device_memory.cuh"
#include "kernels/device_storage.cuh"
#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels::device {

// Entries that one head has room for.
struct head_room {
  int body = 0, tail = 0;
};

// Byte offsets of a head's arrays, each a multiple of 256; room.body rounded up to 16 entries, as
// the tensor-core tier reads scalars.
struct head_layout {
  std::int64_t body_k, body_v, body_k_scale, body_v_scale, body_position, body_score;
  std::int64_t tail_k, tail_v, tail_position, tail_score;
  std::int64_t k_channel, v_channel;
  std::int64_t bytes;  // of one head
};
constexpr head_layout layout_of(const head_room& room, int head_dim, int value_dim) {
  std::int64_t end = 0;
  const auto place = [&end](std::int64_t entries, std::int64_t bytes_each) {
    const std::int64_t begin = end;
    end += (entries * bytes_each + 255) / 256 * 256;
    return begin;
  };
  const std::int64_t body = (std::int64_t{room.body} + 15) / 16 * 16, tail = room.tail;
  head_layout l{};
  l.body_k = place(body, head_dim);
  l.body_v = place(body, value_dim);
  l.body_k_scale = place(body, 2);
  l.body_v_scale = place(body, 2);
  l.body_position = place(body, 4);
  l.body_score = place(body, 4);
  l.tail_k = place(tail, std::int64_t{2} * head_dim);
  l.tail_v = place(tail, std::int64_t{2} * value_dim);
  l.tail_position = place(tail, 4);
  l.tail_score = place(tail, 4);
  l.k_channel = place(head_dim, 4);
  l.v_channel = place(value_dim, 4);
  l.bytes = end;
  return l;
}

// The arrays of one layer's heads.
class layer_arena {
 public:
  layer_arena(const head_room& room, int kv_heads, int head_dim, int value_dim)
      : room_(room),
        layout_(layout_of(room, head_dim, value_dim)),
        bytes_(static_cast<std::size_t>(layout_.bytes * kv_heads), "the cache of a layer") {}

  // Pointers and capacities of a head; lengths 0, no channel scales.
  head_storage storage(int head) const {
    std::uint8_t* base = bytes_.get() + layout_.bytes * head;
    head_storage s;
    s.body_k = reinterpret_cast<std::int8_t*>(base + layout_.body_k);
    s.body_v = reinterpret_cast<std::int8_t*>(base + layout_.body_v);
    s.body_k_scale = reinterpret_cast<std::uint16_t*>(base + layout_.body_k_scale);
    s.body_v_scale = reinterpret_cast<std::uint16_t*>(base + layout_.body_v_scale);
    s.body_position = reinterpret_cast<std::int32_t*>(base + layout_.body_position);
    s.body_score = reinterpret_cast<float*>(base + layout_.body_score);
    s.tail_k = reinterpret_cast<std::uint16_t*>(base + layout_.tail_k);
    s.tail_v = reinterpret_cast<std::uint16_t*>(base + layout_.tail_v);
    s.tail_position = reinterpret_cast<std::int32_t*>(base + layout_.tail_position);
    s.tail_score = reinterpret_cast<float*>(base + layout_.tail_score);
    s.body_capacity = room_.body;
    s.tail_capacity = room_.tail;
    return s;
  }
  float* k_channel(int head) const { return channel(head, layout_.k_channel); }
  float* v_channel(int head) const { return channel(head, layout_.v_channel); }
  const head_room& room() const { return room_; }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_.size()); }

 private:
  float* channel(int head, std::int64_t offset) const {
    return reinterpret_cast<float*>(bytes_.get() + layout_.bytes * head + offset);
  }
  head_room room_;
  head_layout layout_;
  device_buffer<std::uint8_t> bytes_;
};

// Calls move(device array, host array, values) for every array of a head, `n` long in each tier;
// copies between host and device in either direction are written once.
template <class Store, class Move>
void each_array(const head_storage& s, Store& h, const cache_shape& shape, Move move) {
  const std::int64_t k = shape.head_dim, v = shape.value_dim;
  move(s.body_k, h.body_k, s.body * k);
  move(s.body_v, h.body_v, s.body * v);
  move(s.body_k_scale, h.body_k_scale, std::int64_t{s.body});
  move(s.body_v_scale, h.body_v_scale, std::int64_t{s.body});
  move(s.body_position, h.body_position, std::int64_t{s.body});
  move(s.body_score, h.body_score, std::int64_t{s.body});
  move(s.tail_k, h.tail_k, s.tail * k);
  move(s.tail_v, h.tail_v, s.tail * v);
  move(s.tail_position, h.tail_position, std::int64_t{s.tail});
  move(s.tail_score, h.tail_score, std::int64_t{s.tail});
}

// What stands in `from` into the larger arrays of `to`.
inline void copy_entries(const head_storage& from, const head_storage& to, const cache_shape& shape,
                         simt::stream_type stream) {
  const auto copy = [stream](auto* target, const auto* source, std::int64_t n) {
    copy_async(target, source, static_cast<std::size_t>(n) * sizeof(*source), stream);
  };
  const std::int64_t k = shape.head_dim, v = shape.value_dim;
  copy(to.body_k, from.body_k, from.body * k);
  copy(to.body_v, from.body_v, from.body * v);
  copy(to.body_k_scale, from.body_k_scale, from.body);
  copy(to.body_v_scale, from.body_v_scale, from.body);
  copy(to.body_position, from.body_position, from.body);
  copy(to.body_score, from.body_score, from.body);
  copy(to.tail_k, from.tail_k, from.tail * k);
  copy(to.tail_v, from.tail_v, from.tail * v);
  copy(to.tail_position, from.tail_position, from.tail);
  copy(to.tail_score, from.tail_score, from.tail);
}

}  // namespace kvreplay::kernels::device
