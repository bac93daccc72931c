// layer_inputs: what score rules read of a layer beside its cache. In open loop the trace's; a
// closed loop fills it with its own, position by position.
#pragma once

#include <cstdint>
#include <span>

namespace kvreplay::replay {

class future_mass;

// Rows are positions; what a rule does not need may be empty.
struct layer_inputs {
  std::span<const float> retention;       // [positions, kv_heads] natural log, <= 0
  std::span<const float> value_norm;      // [positions, q_heads]
  std::span<const std::uint8_t> image;    // [positions] 1: of an image
  std::span<const float> image_worth;     // [positions]; empty: every image position stays
  std::span<const double> rope_inv_freq;  // [rope_dim / 2] of this layer
  const future_mass* future = nullptr;    // of the recorded run, loaded for the block's steps
};

}  // namespace kvreplay::replay
