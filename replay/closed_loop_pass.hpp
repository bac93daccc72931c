// One run of the closed loop over a sequence: shared by closed_loop.cpp, which drives the model,
// and closed_loop_rows.cpp, which turns what was scored into rows.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "replay/closed_lane.hpp"
#include "replay/closed_loop.hpp"
#include "replay/full_lane.hpp"
#include "replay/future_mass.hpp"
#include "replay/projection.hpp"
#include "replay/row_basics.hpp"
#include "traces/retention_gate.hpp"

namespace kvreplay::replay {

// Rows of one lane in a forward pass; lane null: the reference.
struct lane_rows {
  closed_lane* lane = nullptr;
  size_t index = 0;                   // of the policy
  std::int64_t first = 0, steps = 0;  // positions
  std::int64_t row = 0;               // of the first, in the pass
};

class closed_loop_pass {
 public:
  closed_loop_pass(const traces::reader& trace, int sequence, const tracer::model& model,
                   std::span<const policies::policy> policies, const closed_loop_options& options);
  std::vector<lane_output> run();

 private:
  // What rules read of the recorded run, by layer; q and k as well where a policy looks ahead.
  struct recorded_layer {
    kernels::cache_shape shape;  // of this layer alone
    layer_data data;
    std::unique_ptr<future_mass> future;
  };

  void start_lanes(std::vector<lane_output>& out);
  std::unique_ptr<closed_lane> start_lane(const policies::policy& policy);
  std::vector<layer_inputs> inputs_for(const policies::policy& policy);
  const recorded_layer& recorded(int layer);
  projection_shape projection() const {
    return {shape_.q_heads, shape_.value_dim, model_.config().hidden_size};
  }
  std::vector<float> norms_of(int layer, std::span<const float> v, std::int64_t rows) const;
  std::vector<float> retention_of(int layer, const float* k, const float* v,
                                  std::int64_t rows) const;
  bool gated_retention(const closed_lane& lane) const {
    return retention_gate_.has_value() && lane.state().policy().needs.retention;
  }
  closed_gate gate_for(const policies::policy& policy) const;

  void run_prompt();
  void prompt_layer(tracer::attention_block& block);
  void score_prompt(std::span<const float> residual);
  void run_block(std::int64_t first, std::int64_t steps);
  void run_rows(std::vector<lane_rows>& rows, std::vector<float>& reference);
  void attend(tracer::attention_block& block, std::span<const lane_rows> rows);
  void attend_lane(tracer::attention_block& block, const lane_rows& rows);
  void score_rows(std::span<const lane_rows> rows, std::span<const float> residual,
                  std::span<const float> reference, bool with_reference);
  void load_recorded_logits(std::int64_t first, std::int64_t steps);
  void report_progress(std::int64_t layer_rows);
  std::int32_t token_after(std::int64_t position) const;
  bool free() const { return options_.free.tokens > 0; }
  std::string snapshot_key() const;
  template <class Visit>
  void for_each_state(std::int64_t& next, Visit&& visit);
  void save(std::int64_t next);
  bool load(std::int64_t& next);
  void start_texts();
  void go_on(const lane_rows& rows);
  void finish_free(size_t index, reports::result& row) const;

  void finish(size_t index, lane_output& out) const;
  void finish_memory(const closed_lane* lane, lane_output& out) const;
  void finish_quality(std::span<const logit_score> scores, reports::result& row) const;
  void finish_answers(std::span<const logit_score> scores, reports::result& row) const;
  void finish_confidence(const policies::policy& policy, double tau,
                         std::span<const logit_score> scores, reports::result& row) const;
  void finish_steps(const lane_measures& measures, std::span<const logit_score> scores,
                    lane_output& out) const;
  void finish_details(const lane_measures& measures, std::span<const logit_score> scores,
                      std::span<const std::int64_t> full, reports::result& row) const;
  lane_measures full_measures() const;
  std::vector<std::vector<dropped_positions>> full_dropped() const;

  const traces::reader& trace_;
  const traces::sequence_info info_;  // of a free run: its own length
  const traces::model_info& trace_model_;
  const tracer::model& model_;
  std::span<const policies::policy> policies_;
  const closed_loop_options& options_;
  std::vector<std::int32_t> tokens_;              // the trace's; of a free run: full's own text
  std::vector<std::vector<std::int32_t>> texts_;  // [policies] of a free run
  std::vector<int> layers_;                       // all of the model's
  kernels::cache_shape shape_;
  // [layers] as projection.hpp reads them; empty: no policy asks for value norms.
  std::vector<std::vector<float>> output_weights_;
  std::optional<traces::retention_gate> retention_gate_;  // where a policy reads retention
  std::map<int, recorded_layer> recorded_;
  full_lane full_;
  std::vector<std::unique_ptr<closed_lane>> lanes_;  // [policies]; null: refused, or `full` itself
  std::vector<logit_score> full_scores_;             // [decode steps + 1], from P-1 on
  // KL(recorded || full) of the decode steps, where the trace has whole rows of logits.
  std::vector<double> recorded_kl_;
  std::vector<float> recorded_logits_;  // [steps of the block, logit_size]
  std::int64_t block_first_ = 0;        // of the block being run
  std::chrono::steady_clock::time_point saved_ = std::chrono::steady_clock::now();
  std::int64_t progress_done_ = 0, progress_total_ = 0;
};

}  // namespace kvreplay::replay
