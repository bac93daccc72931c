// match_bytes: scale every budget of a policy by one factor until its mean bytes meet a target.
// Comparisons at unequal bytes mislead.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "policies/policy.hpp"
#include "replay/open_loop.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

struct matched_policy {
  policies::policy policy;    // with the scaled budgets in its resolved string
  reports::maybe factor;      // empty: the policy has no budget, or could not be measured
  reports::maybe difference;  // (mean_bytes - target) / target where it is beyond 0.5 %
  std::string note;
};

// A policy with every budget multiplied: entries become max(1, sinks + recent, floor(f * B + 0.5)),
// percentages and bytes scale as they are. Budgets stay readable: the result can be pasted.
policies::policy scale_budgets(const policies::policy& policy, double factor);

// By bracketing and interpolation on real replays of the sequence, all policies side by side. Where
// two neighbouring settings bracket the target, the one below is taken.
std::vector<matched_policy> match_bytes(const traces::reader& trace, int sequence,
                                        std::span<const policies::policy> policies,
                                        double target_bytes, const open_loop_options& options);

}  // namespace kvreplay::replay
