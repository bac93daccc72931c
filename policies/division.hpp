// Dividing a budget over heads by what their entries are worth: AdaKV over the heads of a layer,
// `global` over all of a model. Pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/policy.hpp"

namespace kvreplay::policies {

// An entry that competes; protected entries do not.
struct candidate {
  float score;
  std::int32_t position;
};

// How many candidates of each head stay: its best first[h] (all, if it has fewer), then the best of
// the rest over all heads until `total` is reached. Higher score first; equal scores: the newer
// position, then the lower head.   candidates [heads][any order], first [heads]
std::vector<int> divide(std::span<const std::vector<candidate>> candidates,
                        std::span<const int> first, std::int64_t total);

// AdaKV (arXiv 2407.11550) over the heads of a layer. free [heads]: what a head's even budget
// leaves beside its protected entries. reserve: the floor first, sum(free) in all. blend: the
// published rint(count * (1 - floor) + floor(floor * free)), half to even, whose sum is not exact.
std::vector<int> adaptive_counts(const division_rule& rule,
                                 std::span<const std::vector<candidate>> candidates,
                                 std::span<const int> free);

}  // namespace kvreplay::policies
