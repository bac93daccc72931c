// update_scores: what a step's attention mass does to the scores that stand beside the entries.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

// sum: score += mass. ema: score = decay * score + (1 - decay) * mass. last: score = mass.
// In every rule the first observation sets the score.
enum class score_rule : std::uint8_t { none, sum, ema, last };

struct score_item {
  kv_cache* cache = nullptr;
  int layer = 0;
  const float* mass = nullptr;  // [kv_heads, mass_stride]
  std::int64_t mass_stride = 0;
  score_rule rule = score_rule::none;
  float decay = 0;
};

// Throws std::domain_error naming layer, head and position where a mass is NaN or negative.
void update_scores(std::span<const score_item> items);

}  // namespace kvreplay::kernels
