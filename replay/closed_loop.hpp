// closed_loop: policies with the model in the loop, tokens teacher-forced from a trace. No decode
// loop: all positions of a block pass a layer together, all policies in one product, each policy's
// cache running over them in order inside the layer (DESIGN, "One idea"). Exact: a row's bits
// depend neither on the block size nor on the other policies nor on threads.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "policies/policy.hpp"
#include "replay/open_loop.hpp"
#include "tracer/model.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

// Each policy, and the full cache, writes its own text after the prompt.
struct free_run {
  std::int64_t tokens = 0;  // 0: teacher-forced
  double temperature = 0;   // 0: greedy
  std::uint64_t seed = 0;   // the same numbers for all policies: as record --generate --seed
};
// What the note of such a row begins with.
std::string free_run_note(const free_run& run);

struct closed_loop_options {
  free_run free;
  std::int64_t block = 128;  // most positions at a time; 1 = token by token
  bool kv_fp32 = false;      // caches keep what the model computes, unrounded (checks)
  std::int64_t skip = 0;     // decode steps left out of the metrics
  // Where the state is kept at block ends, at most every `snapshot_seconds`; empty: nowhere (nor
  // with `kept`). With `resume` a run goes on from what it finds there, if it is of the same trace,
  // model, policies and options; the rows are those of an uninterrupted run.
  std::string snapshot;
  double snapshot_seconds = 30;
  bool resume = false;
  bool per_step = false;  // fill lane_output::steps
  bool kept = false;      // fill lane_output::dropped
  bool details = false;   // fill row.details, but for its heads
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // from one thread at a time
};

// Free runs: blocks of one. A row says how far its text agrees with the full cache's
// (free_agreement, free_prefix); perplexity and KL compare texts that differ and are left out.
//
// One row per policy, in their order, mode `closed`, all layers of the model; the reference of
// every comparison is the full FP16 cache, which always runs along. Of the trace only the tokens
// are needed, and the recorded confidence where a policy reads the future. A policy that fails on
// the way gives a row with status "failed"; the others go on. Throws where the model is not the
// trace's, or where the full cache's own logits are not finite.
std::vector<lane_output> replay_closed(const traces::reader& trace, int sequence,
                                       const tracer::model& model,
                                       std::span<const policies::policy> policies,
                                       const closed_loop_options& options);

}  // namespace kvreplay::replay
