// tune: the best point of a grid under a limit, without running all of it. Coarse to fine: a
// lattice over the grid on the first part of the steps, its better third on all steps, then ever
// closer neighbours of the best.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "policies/grid.hpp"
#include "reports/result.hpp"

namespace kvreplay::replay {

enum class tune_limit : std::uint8_t { max_bytes, max_ratio, min_recall, max_kl };

struct tune_goal {
  tune_limit limit = tune_limit::max_bytes;
  double value = 0;
  // The metric that is made best under a limit on memory; under a limit on quality bytes are.
  std::string quality = "residual_rel_l2";
};

// 0 where the row keeps the limit, else by how much it misses it, relative. Infinite for a failed
// row and where the number is missing.
double violation_of(const tune_goal& goal, const reports::result& row);

// What is minimised among rows that keep the limit.
double loss_of(const tune_goal& goal, const reports::result& row);

// True where a is the better row: fewer violations first, then the smaller loss.
bool better(const tune_goal& goal, const reports::result& a, const reports::result& b);

struct tune_options {
  std::int64_t evaluations = 100;  // rows that may be computed, those on a part of the steps too
  std::int64_t batch = 32;         // at most so many at once, in one pass
};

// One row per SPEC on the first `share` (0..1] of the decode steps; failed where a SPEC is.
using tune_evaluator =
    std::function<std::vector<reports::result>(std::span<const std::string> specs, double share)>;

struct tuned {
  std::vector<reports::result> rows;  // on all steps, best first
  std::int64_t evaluations = 0;       // those on a part of the steps included
  std::int64_t points = 0;            // of all grids
};

// Deterministic. Evaluates every point where the grids have no more than `evaluations`.
tuned tune(std::span<const policies::spec_grid> grids, const tune_goal& goal,
           const tune_options& options, const tune_evaluator& evaluate);

}  // namespace kvreplay::replay
