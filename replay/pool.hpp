// pool: scores over their neighbours in position order (SnapKV, R-KV).
#pragma once

#include <span>
#include <vector>

#include "kernels/kv_cache.hpp"
#include "policies/policy.hpp"

namespace kvreplay::replay {

// Entry indices of a head in ascending order of position.
std::vector<int> position_order(const kernels::head_store& store);

// scores [entries] in entry order, pooled over `kernel` neighbours along `order`. Beyond the ends
// max sees nothing; avg counts zeros and always divides by the width.
void pool_scores(std::span<const int> order, int kernel, policies::pool_kind kind,
                 std::vector<float>& scores);

}  // namespace kvreplay::replay
