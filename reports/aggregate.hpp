// aggregate: rows of one policy over several sequences as one row.
#pragma once

#include <span>
#include <vector>

#include "reports/result.hpp"

namespace kvreplay::reports {

// One row per (policy, mode) that has two good rows or more, in order of first appearance: sequence
// -1, `sequences` their number, every number the mean over those that have it (empty where not all
// have it; counts of tokens and `peak_bytes`, `peak_entries`: summed, the largest), `quality_ci`
// the 95 % bootstrap interval over sequences. `trace` is the common one, or "N traces".
std::vector<result> aggregate(std::span<const result> rows);

}  // namespace kvreplay::reports
