// measures: the open-loop metrics of one policy, collected per step and layer, reduced at the end
// in one fixed order, so that no number depends on which thread came first.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "replay/replay_layer.hpp"
#include "reports/result.hpp"

namespace kvreplay::replay {

// One layer at one step. What a pass does not measure stays 0 and is named by measured_parts.
struct step_measure {
  double recall_sum = 0;  // over query heads
  double bound_sum = 0;
  double error2 = 0, reference2 = 0, output2 = 0, dot = 0;  // over the layer's heads, concatenated
  double residual_error2 = 0;                               // ||W_O (o^ - o)||^2
  double projected_error_l1 = 0, projected_reference_l1 = 0;
  double head_l1_sum = 0;  // over query heads
  std::int64_t bytes = 0, state_bytes = 0, budget = -1;
  std::int32_t entries = 0;  // over KV heads
  std::int32_t evicted = 0;
  float attend_us = 0;
  bool degenerate = false;
};

// Bytes, entries, evictions, budget and time of a step.
void take_events(const step_events& from, step_measure& to);

// Sums over the scored steps for one KV head (of its group of query heads), for --heads.
struct head_measure {
  double entries = 0, recall = 0, error2 = 0, reference2 = 0;
  double l1 = 0;  // over the group: ||(o^_h - o_h) W_O^h||_1
};

// One span of the trace (needle, answer, ...): sums over scored steps, layers and query heads.
struct span_measure {
  double mass = 0, kept_mass = 0;  // A over the span; over span and S
  double all_kept_mass = 0;        // A over S
  double share_kept = 0;           // entries of the span held / entries of the span, summed
  std::int64_t mass_rows = 0, share_rows = 0;
};

// Two-stage selections of one layer, the prompt's included.
struct critical_measure {
  std::int64_t heads = 0;      // KV heads in which one took place
  std::int64_t over_half = 0;  // those whose first stage held more than half of the mass
};

struct lane_measures {
  lane_measures(int layers, std::int64_t decode_steps, int kv_heads, size_t span_count)
      : layers_count(layers),
        step_count(decode_steps),
        steps(static_cast<size_t>(layers) * static_cast<size_t>(decode_steps)),
        heads(static_cast<size_t>(layers) * static_cast<size_t>(kv_heads)),
        spans(static_cast<size_t>(layers) * span_count),
        prompt_evicted(static_cast<size_t>(layers)),
        prompt_degenerate(static_cast<size_t>(layers)),
        critical(static_cast<size_t>(layers)) {}

  step_measure& at(int slot, std::int64_t step) {
    return steps[static_cast<size_t>(slot) * static_cast<size_t>(step_count) +
                 static_cast<size_t>(step)];
  }
  const step_measure& at(int slot, std::int64_t step) const {
    return steps[static_cast<size_t>(slot) * static_cast<size_t>(step_count) +
                 static_cast<size_t>(step)];
  }

  int layers_count;
  std::int64_t step_count;
  std::vector<step_measure> steps;              // [layers, decode steps]
  std::vector<head_measure> heads;              // [layers, kv_heads]
  std::vector<span_measure> spans;              // [layers, spans]
  std::vector<std::int64_t> prompt_evicted;     // [layers]
  std::vector<std::uint8_t> prompt_degenerate;  // [layers] more was protected than the budget held
  std::vector<critical_measure> critical;       // [layers]
  std::vector<double> head_l1;  // [layers, q_heads] sums over scored steps, or empty
};

// What was measured at all in this pass.
struct measured_parts {
  bool recall = false, bound = false, output = false, residual = false, projected = false;
};

struct reduce_context {
  int q_heads = 0, kv_heads = 0;
  std::int64_t skip = 0;                          // decode steps left out of the metrics
  std::span<const std::int64_t> full_bytes;       // [decode steps], everything kept in FP16
  std::vector<std::vector<float>> residual_norm;  // [layers][decode steps] or empty
  measured_parts parts;
  double loose_entries = -1;  // high + 1 as a mean over layers; < 0: ungated
};

// Fills memory, quality, quality_ci, loose_share, events and attend times of `row`.
void reduce_measures(const lane_measures& measures, const reduce_context& context,
                     reports::result& row);

}  // namespace kvreplay::replay
