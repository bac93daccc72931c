// critical: CriticalKV's two stages (arXiv 2502.03805, algorithm 1).
#pragma once

#include <span>
#include <vector>

#include "replay/replay_layer.hpp"

namespace kvreplay::replay {

// Rewrites the worth of every head that holds more than its budget. Of what the budget leaves
// beside the protected entries, the best `first` by worth s come before all others; the rest rank
// by (s + epsilon) * norm, s normalised to sum 1 over the entries that are not protected, norm the
// mean over the head's query heads of the L1 norm of the value through the output projection. worth
// [kv_heads][entries], budget [kv_heads]. Counts in `events` the heads, and those in which the
// first stage holds more than half of s.
void apply_critical(const lane& lane, int slot, std::int64_t step, const layer_inputs& inputs,
                    const policies::protection& protect, std::span<const int> budget,
                    std::span<std::vector<float>> worth, step_events& events);

}  // namespace kvreplay::replay
