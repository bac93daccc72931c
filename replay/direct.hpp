// direct: each layer's attention error carried to the logits along the residual stream, without
// running the model (direct_kl, direct_nll; METRICS).
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "reports/result.hpp"
#include "tracer/model.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

// The sum over layers of what a policy adds to the residual stream beyond what the full cache does,
// for every decode step. Kept in fixed point, so that it does not depend on the order in which
// layers come. Safe from several threads.
class direct_error {
 public:
  direct_error(std::int64_t steps, std::int64_t hidden_size)
      : hidden_(hidden_size), sum_(static_cast<size_t>(steps * hidden_size)) {}

  // Rows of some steps from `step` on (0 = the first decode step), [rows, hidden_size] both.
  void add(std::int64_t step, std::span<const float> policy, std::span<const float> full);
  // out [hidden_size] = base + the sum of a step.
  void shifted(std::int64_t step, const float* base, float* out) const;

 private:
  std::int64_t hidden_;
  std::mutex mutex_;
  std::vector<std::int64_t> sum_;  // [steps, hidden_size], in 2^-30
};

struct direct_lane {
  const direct_error* error = nullptr;
  reports::result* row = nullptr;
};

// Sets direct_kl, direct_nll, kl_proxy (where residual_rel_l2 is there) and their intervals. Needs
// residual_final at P .. T-1, T being n_tokens; skip: decode steps left out.
void score_direct(const traces::reader& trace, const traces::sequence_info& info,
                  const tracer::model& model, std::int64_t skip,
                  std::span<const direct_lane> lanes);

}  // namespace kvreplay::replay
