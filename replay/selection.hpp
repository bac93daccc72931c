// selection: step 6. What stays after a step: budgets per head, what entries are worth, two-stage
// rules, sets that a file gives.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "replay/layer_inputs.hpp"
#include "replay/replay_layer.hpp"

namespace kvreplay::replay {

// One layer of a lane after step t (P-1 included). Fills evicted, budget, degenerate and the
// critical counts of `events`. A lane with a budget over all layers must know its counts of the
// step (lane::decide_counts).
void select_entries(lane& lane, int slot, std::int64_t step, const layer_inputs& inputs,
                    step_events& events);

// How many entries each (slot, KV head) keeps after a step under a budget over all layers:
// [slots * kv_heads]. All layers have attended; inputs [slots]. Entries that are protected stay in
// any case; if they alone exceed the budget, every head has an even part of it.
std::vector<int> global_counts(lane& lane, std::int64_t step, std::span<const layer_inputs> inputs);

// The same, written into the lane (lane::decide_counts); at a step without a selection nothing is
// decided, and the counts that stand there mean nothing.
void decide_all_layers(lane& lane, std::int64_t step, std::span<const layer_inputs> inputs);

}  // namespace kvreplay::replay
