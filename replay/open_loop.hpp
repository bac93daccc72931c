// open_loop: policies over a recorded sequence, from the trace alone. Layers are independent and
// run in parallel; inside a layer the steps run in order; all policies share one reading of the
// layer.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "kernels/device_cache.hpp"
#include "policies/policy.hpp"
#include "replay/kept_log.hpp"
#include "reports/csv.hpp"
#include "reports/result.hpp"
#include "tracer/model.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

struct open_loop_options {
  // For direct_kl, direct_nll and kl_proxy, where the trace has residual_final: output projections,
  // final norm and head are read, nothing is run. Must be the trace's own.
  const tracer::model* model = nullptr;
  bool bound = true;         // recall_bound and span metrics: whole rows, O(context) per step
  bool quality = true;       // false: memory and events only (budgets being matched)
  std::int64_t skip = 0;     // decode steps left out of the metrics
  std::int64_t steps = 0;    // only the first so many decode steps; 0: all
  std::int64_t block = 128;  // most steps at a time; results do not depend on it
  bool per_step = false;     // fill lane_output::steps
  bool per_head = false;     // fill lane_output::heads
  bool kept = false;         // fill lane_output::dropped
  bool details = false;      // fill row.details
  // Runs the policies that it can; the others run on the host, and their note says so.
  kernels::compute_device* device = nullptr;
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // from one thread at a time
};

struct lane_output {
  reports::result row;
  std::vector<reports::step_row> steps;
  std::vector<reports::head_row> heads;
  std::vector<int> layers;                              // model numbers of those that took part
  std::vector<std::vector<dropped_positions>> dropped;  // [layers * kv_heads]
};

// One row per policy, in their order. A policy that the trace cannot serve, or that fails on the
// way, gives a row with status "failed" and the reason as its note; the others go on.
std::vector<lane_output> replay_open(const traces::reader& trace, int sequence,
                                     std::span<const policies::policy> policies,
                                     const open_loop_options& options);

// Calls visit(step, layer, kv_head, positions ascending) for P-1 .. T-1, layers, heads.
void for_each_kept_set(
    const traces::reader& trace, int sequence, const lane_output& lane,
    const std::function<void(std::int64_t step, int layer, int kv_head,
                             const std::vector<std::int32_t>& positions)>& visit);

}  // namespace kvreplay::replay
