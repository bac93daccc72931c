// timing: a policy's real lengths (the sawtooth of a gate included) through the kernels at the
// recorded shapes. One core; every step of the trace runs on every sequence of the batch, layer by
// layer, as a deployment would; the full FP16 cache is timed the same way beside it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/device_cache.hpp"
#include "policies/policy.hpp"
#include "reports/result.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

struct timing_options {
  std::vector<int> batch = {1};  // copies of the sequence, each with a cache of its own
  int repeat = 3;                // rounds; more where they give fewer than 30 samples
  // Null: one core. Else all layers and copies run on it together, its caches cold at every step;
  // a policy without kernels there is a failed row.
  kernels::compute_device* device = nullptr;
  std::function<void(std::int64_t done, std::int64_t total)> progress;
};

// One row per policy and batch size, in that order, mode "time"; fields `time` of METRICS. Nothing
// is timed before the policy's outputs were compared with double-precision attention over the
// recorded keys and values of the entries it held: a row that differs fails.
std::vector<reports::result> time_policies(const traces::reader& trace, int sequence,
                                           std::span<const policies::policy> policies,
                                           const timing_options& options);

// Bytes read and written per second when `bytes` are copied: the best of several copies.
double copy_bandwidth(std::int64_t bytes);

}  // namespace kvreplay::replay
