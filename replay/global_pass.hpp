// global_pass: lanes whose budget spans all layers (`global`). Their decisions, how many entries
// each KV head keeps after each step, need every layer of a step before the next; once they are
// known, layers are independent again.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "replay/replay_layer.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

// Runs a copy of each lane step by step through all layers and writes the counts into the lane
// (lane::decide_counts). Holds q, k and v of all layers in memory at once. Returns one line for
// every lane that failed, empty for the others.
std::vector<std::string> decide_global_lanes(const traces::reader& trace, int sequence,
                                             std::span<lane* const> lanes);

}  // namespace kvreplay::replay
