// The storage of one KV head in device memory, and the small loops that its kernels share.
#pragma once

#include <cstdint>

#include "kernels/simt/simt.hpp"

namespace kvreplay::kernels::device {

inline constexpr float log2_e = 1.44269504F;
inline constexpr float ln_2 = 0.693147181F;
inline constexpr float lowest = -3e38F;  // where maxima start: finite, so that no inf - inf arises

// What a kernel found wrong; bits of head_storage::fault. Kernels cannot throw: who launches them
// reads the word back, at the latest before results are used.
inline constexpr int fault_not_finite = 1;   // a key or value that is NaN, infinite or beyond FP16
inline constexpr int fault_no_room = 2;      // a tier's capacity is used up
inline constexpr int fault_scale_range = 4;  // a row too large for a float16 scalar
inline constexpr int fault_score_is_nan = 8;
inline constexpr int fault_mass = 16;      // attention mass that is NaN or infinite
inline constexpr int fault_no_table = 32;  // an entry ages before its channel scales are known

// One KV head of one item (layer, sequence, policy). The struct lies in device memory, lengths
// included, so that a captured graph follows them. What stands beyond a length never matters.
// Tensor-core tier: rows start at multiples of 16 bytes, and the scalars can be read up to the next
// multiple of 16 entries.
struct head_storage {
  std::int8_t* body_k = nullptr;           // [body, head_dim]
  std::int8_t* body_v = nullptr;           // [body, value_dim]
  std::uint16_t* body_k_scale = nullptr;   // [body], FP16
  std::uint16_t* body_v_scale = nullptr;   // [body], FP16
  std::int32_t* body_position = nullptr;   // [body]
  float* body_score = nullptr;             // [body]
  std::uint16_t* tail_k = nullptr;         // [tail, head_dim], FP16
  std::uint16_t* tail_v = nullptr;         // [tail, value_dim], FP16
  std::int32_t* tail_position = nullptr;   // [tail]
  float* tail_score = nullptr;             // [tail]
  const float* k_channel_scale = nullptr;  // [head_dim] or null: ones
  const float* v_channel_scale = nullptr;  // [value_dim] or null: ones
  int body = 0, tail = 0;
  int body_capacity = 0, tail_capacity = 0;
  int fault = 0;
  int quantised = 0;  // entries that have moved to the body so far
};

SIMT_DEVICE std::int32_t position_of(const head_storage& h, int entry) {
  return entry < h.body ? h.body_position[entry] : h.tail_position[entry - h.body];
}

SIMT_DEVICE int thread() { return static_cast<int>(simt::thread_index()); }
SIMT_DEVICE int lane_of_warp() { return thread() % simt::warp_size; }
SIMT_DEVICE int warp_of_block() { return thread() / simt::warp_size; }
SIMT_DEVICE int threads() { return static_cast<int>(simt::block_size()); }

inline unsigned blocks_for(int n, int per) { return static_cast<unsigned>((n + per - 1) / per); }

// Refuses a launch: `what` completes "OPERATION on the device: ".
[[noreturn]] inline void refuse(const char* operation, const char* what) {
  throw simt::failure(std::string(operation) + " on the device: " + what);
}

}  // namespace kvreplay::kernels::device
