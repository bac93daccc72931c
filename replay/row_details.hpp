// row_details: what the charts of a report are drawn from, out of what was measured for a row.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "replay/measures.hpp"
#include "reports/details.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

// Series over all decode steps, the histogram of the confidences of the scored ones, the needle's
// place. full_bytes: [decode steps]; confidence: [decode steps] or empty; skip: steps not scored.
reports::row_details step_details(const lane_measures& measures, int kv_heads,
                                  const traces::sequence_info& info,
                                  std::span<const std::int64_t> full_bytes,
                                  std::span<const double> confidence, std::int64_t skip);

// Means over the `scored` steps, by the recorded layers' numbers.
reports::head_map head_details(const lane_measures& measures, const std::vector<int>& layers,
                               int kv_heads, const measured_parts& parts, std::int64_t scored);

}  // namespace kvreplay::replay
