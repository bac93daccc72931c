// kept_log: which positions a lane let go of, and when. The kept sets follow (for_each_kept_set).
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kv_cache.hpp"

namespace kvreplay::replay {

// Positions that left a KV head after step `step` (eviction or the layer's window); after P-1 the
// prompt's positions that did not stay.
struct dropped_positions {
  std::int64_t step = 0;
  std::vector<std::int32_t> positions;
  bool operator==(const dropped_positions&) const = default;
};

// Distinct slots may be noted by distinct threads.
class kept_log {
 public:
  kept_log() = default;  // notes nothing
  kept_log(int layers, int kv_heads, std::int64_t n_prompt);

  bool on() const { return !dropped_.empty(); }
  // After step 7 of a step, P-1 included; steps in order.
  void note(const kernels::kv_cache& cache, int slot, std::int64_t step);
  // Forgets steps from `step` on; `cache` is as it was before that step.
  void rewind(const kernels::kv_cache& cache, std::int64_t step);
  // [layers * kv_heads]
  const std::vector<std::vector<dropped_positions>>& dropped() const { return dropped_; }

 private:
  int kv_heads_ = 0;
  std::int64_t n_prompt_ = 0;
  std::vector<std::vector<dropped_positions>> dropped_;  // [layers * kv_heads]
  std::vector<std::vector<std::int32_t>> held_;          // the last kept sets
};

}  // namespace kvreplay::replay
