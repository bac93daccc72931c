// gap: how much of the distance between a plain baseline and the full cache a policy closes.
#pragma once

#include <span>

#include "reports/result.hpp"

namespace kvreplay::replay {

// Sets gap_closed and gap_closed_streaming of closed-loop rows, (ppl_ref - ppl) / (ppl_ref -
// full_ppl), and names the references in gap_reference. The reference is a row of the same trace
// and sequence: of all `window` (`streaming`) rows whose mean bytes do not exceed the policy's, the
// one that has most. Nothing where there is none, or where the distance is below 0.05.
void fill_gaps(std::span<reports::result> rows);

}  // namespace kvreplay::replay
