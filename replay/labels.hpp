// labels: short names of rows for a table, and what their notes say.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "reports/result.hpp"

namespace kvreplay::replay {

// What every table of open-loop rows says.
inline constexpr const char* open_loop_line =
    "open loop: recorded activations; what evicted context changes in later hidden states is left "
    "out";
// And of closed-loop rows.
inline constexpr const char* closed_loop_line =
    "closed loop: the model runs on the policy's cache; full, in FP16, runs along as the reference";

// One per row: the policy with those of its parameters that are not as by default.
std::vector<std::string> labels_of(std::span<const reports::result> rows);

// What the notes of good rows say, each text once, with the labels of the rows it is about.
std::vector<std::string> note_lines(std::span<const reports::result> rows,
                                    std::span<const std::string> labels);

}  // namespace kvreplay::replay
