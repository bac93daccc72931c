// probe: does confidence say how much a step needs its recent past? For each decode step t the
// positions t-n .. t-1 are hidden from that step alone, in all layers (METRICS,
// confidence_kl_pearson).
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "reports/result.hpp"
#include "tracer/model.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

struct probe_point {
  std::int64_t position = 0;
  double confidence = 0;  // of the full cache's logits, weights 0.4, 0.3, 0.3
  double kl = 0;          // KL(full || hidden), nats
};

struct probe_series {
  int hidden = 0;                   // n
  std::vector<probe_point> points;  // steps that see something beside the hidden and themselves
  reports::maybe pearson, spearman;
  std::pair<reports::maybe, reports::maybe> pearson_ci, spearman_ci;  // 95 %, blocks of 64 steps
};

// One series per n. The model must be the trace's; tokens are the trace's.
std::vector<probe_series> probe_confidence(
    const traces::reader& trace, int sequence, const tracer::model& model,
    std::span<const int> hidden, std::int64_t block,
    const std::function<void(std::int64_t done, std::int64_t total)>& progress);

// The correlations of a series from its points.
void correlate(probe_series& series);

}  // namespace kvreplay::replay
