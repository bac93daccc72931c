// For tests: policies by SPEC and what they held.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "policies/policy.hpp"
#include "replay/open_loop.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

using kept_key = std::tuple<std::int64_t, int, int>;  // step, layer, head
using kept_map = std::map<kept_key, std::vector<std::int32_t>>;

inline std::vector<policies::policy> parse_all(const std::vector<std::string>& specs) {
  std::vector<policies::policy> out;
  for (const auto& spec : specs) out.push_back(policies::parse_policy(spec));
  return out;
}

inline kept_map kept_sets(const traces::reader& trace, const lane_output& lane) {
  kept_map sets;
  for_each_kept_set(trace, 0, lane, [&](std::int64_t step, int layer, int head, const auto& p) {
    sets[{step, layer, head}] = p;
  });
  return sets;
}

}  // namespace kvreplay::replay
