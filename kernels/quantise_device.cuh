// append and age in one kernel: the newcomer enters the tail, and every tail entry whose time has
// come moves to the body as INT8 codes (scales hybrid and token). Codes and scalars are the host's
// (quantise.hpp) to the bit; slots have no order, so holes are filled from the tail's end.
#pragma once

#include "kernels/device_storage.cuh"
#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels::device {

inline constexpr int append_threads = 64;  // one warp for keys, one for values
inline constexpr float largest_code = 127.0F;
inline constexpr std::uint16_t smallest_token_scale = 0x0400;  // 2^-14

struct append_head {
  head_storage* storage = nullptr;
  const float* k = nullptr;  // [head_dim] of the newcomer
  const float* v = nullptr;  // [value_dim]
  std::int32_t position = 0;
};

struct append_batch {
  const append_head* heads = nullptr;  // [head_count], in device memory
  int head_count = 0;
  int head_dim = 0, value_dim = 0;
  int window = 0, sinks = 0;  // the tail keeps position > step - window and position < sinks
  bool ages = true;           // false: an FP16 cache, entries stay in the tail
  bool needs_table = false;   // hybrid: a head without channel scales cannot age
};

// A row of one tier as a warp handles it: keys or values.
struct row_pair {
  std::uint16_t* tail;   // [tail_capacity, dim]
  std::int8_t* body;     // [body_capacity, dim]
  std::uint16_t* scale;  // [body_capacity]
  const float* channel;  // [dim] or null
  const float* fresh;    // [dim]
  int dim;
};
SIMT_DEVICE row_pair rows_of(const append_batch& a, const append_head& h, bool values) {
  const head_storage& s = *h.storage;
  if (values) return {s.tail_v, s.body_v, s.body_v_scale, s.v_channel_scale, h.v, a.value_dim};
  return {s.tail_k, s.body_k, s.body_k_scale, s.k_channel_scale, h.k, a.head_dim};
}

// The scalar of a row with that largest magnitude, as half bits: rounded up, at least 2^-14.
SIMT_DEVICE std::uint16_t token_scale_bits(float absmax) {
  std::uint16_t bits = simt::float_to_half(simt::divide(absmax, largest_code));
  // 11 bits times 7 bits: exact in FP32.
  if (simt::multiply(largest_code, simt::half_to_float(bits)) < absmax) ++bits;
  return bits < smallest_token_scale ? smallest_token_scale : bits;
}

SIMT_DEVICE std::int8_t code_of(float quotient) {
  const float low = quotient < -largest_code ? -largest_code : quotient;
  return static_cast<std::int8_t>(simt::round_to_int(low > largest_code ? largest_code : low));
}

// Tail row `from` becomes body row `to`. Returns the faults found, the same in all lanes.
SIMT_DEVICE int quantise_row(const row_pair& r, int from, int to) {
  const std::uint16_t* x = r.tail + std::int64_t{from} * r.dim;
  float most = 0;
  bool finite = true;
  for (int c = lane_of_warp(); c < r.dim; c += simt::warp_size) {
    const float value = simt::half_to_float(x[c]);
    finite = finite && simt::abs_value(value) <= 65504.0F;
    const float scaled = r.channel == nullptr ? value : simt::divide(value, r.channel[c]);
    most = simt::greater_of(most, simt::abs_value(scaled));
  }
  most = simt::warp_max(most);
  if (simt::ballot(finite) != 0xffffffffu) return fault_not_finite;
  const std::uint16_t bits = token_scale_bits(most);
  if ((bits & 0x7c00u) == 0x7c00u) return fault_scale_range;
  const float step = simt::half_to_float(bits);
  for (int c = lane_of_warp(); c < r.dim; c += simt::warp_size) {
    const float value = simt::half_to_float(x[c]);
    const float scaled = r.channel == nullptr ? value : simt::divide(value, r.channel[c]);
    r.body[std::int64_t{to} * r.dim + c] = code_of(simt::divide(scaled, step));
  }
  if (lane_of_warp() == 0) r.scale[to] = bits;
  return 0;
}

// The newcomer's row into the tail. Returns the faults found, the same in all lanes.
SIMT_DEVICE int store_fresh(const row_pair& r, int slot) {
  bool finite = true;
  for (int c = lane_of_warp(); c < r.dim; c += simt::warp_size) {
    const std::uint16_t bits = simt::float_to_half(r.fresh[c]);
    finite = finite && (bits & 0x7c00u) != 0x7c00u;
    r.tail[std::int64_t{slot} * r.dim + c] = bits;
  }
  return simt::ballot(finite) == 0xffffffffu ? 0 : fault_not_finite;
}

SIMT_DEVICE void move_tail_row(const row_pair& r, int from, int to) {
  for (int c = lane_of_warp(); c < r.dim; c += simt::warp_size) {
    r.tail[std::int64_t{to} * r.dim + c] = r.tail[std::int64_t{from} * r.dim + c];
  }
}

// grid (heads), block 64: warp 0 handles keys, positions and scores, warp 1 values. A head with a
// fault is left as far as it came; its fault word says so.
SIMT_KERNEL SIMT_BOUNDS(append_threads, 8) append_kernel(append_batch a) {
  SIMT_SHARED(int, found, 2);
  const append_head& h = a.heads[simt::block_x()];
  head_storage& s = *h.storage;
  const int warp = warp_of_block();
  const bool first = thread() == 0;
  const row_pair rows = rows_of(a, h, warp == 1);
  int tail = s.tail, body = s.body, fault = s.fault;
  if (tail >= s.tail_capacity) fault |= fault_no_room;
  const int fresh = fault == 0 ? store_fresh(rows, tail) : fault;
  if (lane_of_warp() == 0) found[warp] = fresh;
  if (first && fault == 0) {
    s.tail_position[tail] = h.position;
    s.tail_score[tail] = unobserved_score;
  }
  simt::sync_threads();
  fault |= found[0] | found[1];
  if (fault == 0) ++tail;
  const int newest = h.position - a.window;
  // From the end, so that what fills a hole has been looked at already.
  for (int slot = tail - 1; slot >= 0 && fault == 0 && a.ages; --slot) {
    const std::int32_t position = s.tail_position[slot];
    if (position > newest || position < a.sinks) continue;
    simt::sync_threads();  // found and the position have been read by all
    int problem = body < s.body_capacity ? 0 : fault_no_room;
    if (a.needs_table && rows.channel == nullptr) problem = fault_no_table;
    if (problem == 0) problem = quantise_row(rows, slot, body);
    if (lane_of_warp() == 0) found[warp] = problem;
    simt::sync_threads();
    fault |= found[0] | found[1];
    if (fault != 0) break;
    --tail;
    if (slot != tail) move_tail_row(rows, tail, slot);
    if (first) {
      s.body_position[body] = position;
      s.body_score[body] = s.tail_score[slot];
      s.tail_position[slot] = s.tail_position[tail];
      s.tail_score[slot] = s.tail_score[tail];
    }
    ++body;
    simt::sync_threads();
  }
  simt::sync_threads();  // lengths have been read by all
  if (!first) return;
  s.quantised += body - s.body;
  s.tail = tail;
  s.body = body;
  s.fault = fault;
}

inline void launch_append(const append_batch& a, simt::stream_type stream) {
  if (a.heads == nullptr || a.head_count < 1) refuse("append", "there are no heads");
  if (a.head_dim < 1 || a.value_dim < 1) refuse("append", "head_dim or value_dim is below 1");
  if (a.window < 0 || a.sinks < 0) refuse("append", "window or sinks is negative");
  simt::launch(append_kernel, {static_cast<unsigned>(a.head_count)}, append_threads, a, stream);
}

}  // namespace kvreplay::kernels::device
