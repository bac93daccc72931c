// sweep: many points of many grids over many sequences, in batches that share one reading of the
// trace, on as many ranks as there are.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "policies/policy.hpp"
#include "replay/open_loop.hpp"
#include "reports/result.hpp"
#include "tracer/model.hpp"

namespace kvreplay::replay {

// A point of a grid. A corner that makes no sense (high below recent) has no policy but a reason.
struct sweep_point {
  std::string spec;
  std::optional<policies::policy> policy;
  std::string complaint;
  std::string resolved() const { return policy ? policy->resolved : spec; }
};

// The points of all grids, in order; a point that resolves to what an earlier one does is left out
// and counted in `repeated`. Throws policies::spec_error (grid.hpp).
std::vector<sweep_point> sweep_points(std::span<const std::string> specs, std::int64_t& repeated);

// Points shard, shard + of, ... of them: the part of job `shard` (0-based) of `of`.
std::vector<sweep_point> take_shard(const std::vector<sweep_point>& points, int shard, int of);

struct sweep_options {
  std::int64_t batch_points = 32;  // points that share one pass over a sequence
  open_loop_options open;          // progress is not used
  // With a model, closed-loop rows; `also_open`: behind the open-loop rows of the same sequence.
  const tracer::model* model = nullptr;
  bool also_open = true;
  bool recover = false;
  // Rows of an interrupted run: finished points are recognised by resolved string, sequence and the
  // trace's fingerprint, and not run again.
  std::vector<reports::result> known;
  // On rank 0, in order of completion, for rows that were run now.
  std::function<void(const reports::result&)> finished;
  // On rank 0: points done so far and in all (times sequences).
  std::function<void(std::int64_t done, std::int64_t total)> progress;
  // On rank 0, once: the first point took so long; so many more are to come.
  std::function<void(double seconds, std::int64_t more)> pilot;
};

// On rank 0 the rows, by trace, sequence, mode and point; on other ranks none. A trace that cannot
// be read throws where it is the only one, else its points are failed rows. Every rank calls it
// with the same arguments (but for `known` and the callbacks, which only rank 0 needs).
std::vector<reports::result> sweep(std::span<const std::string> traces,
                                   std::span<const sweep_point> points,
                                   const sweep_options& options);

}  // namespace kvreplay::replay
