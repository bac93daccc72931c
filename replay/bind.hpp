// bind: where the folders meet. A trace's model and a policy's rules in the words of kernels/ and
// policies/, and what a trace offers against what a policy needs.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "kernels/attend.hpp"
#include "kernels/kv_cache.hpp"
#include "kernels/select.hpp"
#include "kernels/update_scores.hpp"
#include "policies/budget.hpp"
#include "policies/policy.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

// The cache that holds `layers` (model numbers, in this order) of a traced model.
kernels::cache_shape cache_shape_for(const traces::model_info& model, std::span<const int> layers);

kernels::storage_format storage_for(const policies::precision_rule& precision);

policies::model_dims dims_for(const traces::model_info& model);

// A policy's score rule as the kernels execute it.
struct kernel_rules {
  kernels::mass_layout mass = kernels::mass_layout::none;  // none: attention mass is not needed
  kernels::score_rule update = kernels::score_rule::none;
  kernels::rank_rule rank = kernels::rank_rule::position;
  float decay = 0, recency = 0;
  std::uint64_t seed = 0;
  bool one_set = false;
};
kernel_rules rules_for(const policies::score_rule& score);

// How a score rule reduces mass over query heads.
kernels::mass_layout layout_of(const policies::score_rule& score);

// Empty if the sequence has what the policy reads; else one line that names the dataset and how to
// record it (offers.cpp).
std::string missing_for(const policies::policy& policy, const traces::reader& trace, int sequence);

// The row of `positions` (ascending) from which `count` consecutive positions start at `first`; -1
// if there is no such run.
std::int64_t find_run(const std::vector<std::int32_t>& positions, std::int64_t first,
                      std::int64_t count);

// c(P-1), c(P) .. c(T-1) of a sequence under a gate's weights and temperature, in double. Reads
// `confidence` where the file has it, else `logits`; full logits for a temperature other than 1.
std::vector<double> recorded_confidence(const traces::reader& trace, int sequence,
                                        const policies::gate_rule& gate);

}  // namespace kvreplay::replay
