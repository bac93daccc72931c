// kept_sets: what a file says that each KV head holds after a step (`kept`).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace kvreplay::policies {

struct kept_sets {
  std::string file;  // for messages
  // (step, layer of the model, KV head) -> positions, ascending
  std::map<std::tuple<std::int64_t, int, int>, std::vector<std::int32_t>> held;
};

}  // namespace kvreplay::policies
