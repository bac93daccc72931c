// timing_parts: what `time` measures and checks on either back end (timing.cpp, timing_device.cpp).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "policies/policy.hpp"
#include "replay/layer_data.hpp"
#include "replay/replay_layer.hpp"
#include "replay/timing.hpp"

namespace kvreplay::replay {

inline constexpr double short_launch_us = 10;

// One step of one round, over layers and batch.
struct step_sample {
  double append = 0, attend = 0, update_scores = 0, select = 0, age = 0;
  double bytes = 0;  // that attention must read
  double total() const { return append + attend + update_scores + select + age; }
};

// One policy, or the full cache beside it.
struct timed_lane {
  const policies::policy* policy = nullptr;
  std::vector<std::uint8_t> tight;
  std::string failed;
  // [batch sizes][rounds * decode steps]
  std::vector<std::vector<step_sample>> samples;
  std::int64_t launches = 0, short_launches = 0;
  double entries = 0, bytes = 0;  // summed over layers and steps, one sequence
  double wall_s = 0;
};

// Throws where o [q_heads, value_dim] differs from double-precision attention over the recorded
// keys and values of the positions that a slot holds by more than its precision explains. `shape`
// has this one layer.
void check_output(const kernels::cache_shape& shape, const lane& lane, int slot,
                  const layer_data& data, std::int64_t t, const float* o);

// All layers and copies of the sequence in one sequence of launches a step, caches of the device
// flushed before each. Fills samples, counts and failures of the lanes.
void time_on_device(const traces::reader& trace, int sequence, const timing_options& options,
                    int rounds, std::span<timed_lane> lanes);

}  // namespace kvreplay::replay
