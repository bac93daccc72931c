// closed_lane: one policy on its way through the closed loop, block by block. A block whose
// decisions wait for its own logits iterates from a snapshot until they are what it was run with
// (DESIGN, "One idea").
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "policies/gate.hpp"
#include "replay/kept_log.hpp"
#include "replay/logit_scores.hpp"
#include "replay/measures.hpp"
#include "replay/replay_layer.hpp"

namespace kvreplay::replay {

// How a lane's decisions come about.
struct closed_gate {
  bool waits = false;                 // they need the confidence of the lane's own logits
  double tau = 0;                     // resolved
  std::vector<std::uint8_t> assumed;  // [decode steps + 1] from P-1 on; final where !waits, else
                                      // what the first pass of a block uses; empty: ungated
  bool known = false;                 // waits: `assumed` comes from a recording
};

class closed_lane {
 public:
  // `block`: most steps at a time. measures and scores cover `decode_steps`. inputs [slots]: what
  // the lane's rules read of each layer; what they point to must outlive the lane.
  closed_lane(lane state, std::vector<layer_inputs> inputs, const closed_gate& gate,
              std::int64_t decode_steps, std::int64_t block, bool kept);

  lane& state() { return state_; }
  const lane& state() const { return state_; }
  const lane_measures& measures() const { return measures_; }
  const kept_log& kept() const { return kept_; }
  const closed_gate& gate() const { return gate_; }
  const layer_inputs& inputs(int slot) const { return inputs_[static_cast<size_t>(slot)]; }

  // The lane's own value norms of a layer, [rows, q_heads] from position `first` on, as far as its
  // rules read them: before these rows are run, and again in every pass.
  void set_value_norms(int slot, std::int64_t first, std::span<const float> norms);
  // The same for ln beta of positions first .. of a layer, [rows, kv_heads], after own_retention():
  // from then on rules read what a gate says of the lane's own keys and values, not the recording.
  void own_retention();
  void set_retention(int slot, std::int64_t first, std::span<const float> rows);

  // After fill_prompt of a layer. A lane whose decision waits settles in end_prompt instead.
  void settle_prompt(int slot);
  // `score` is that of position P-1.
  void end_prompt(const logit_score& score);

  std::int64_t next() const { return next_; }        // the first step that is not final
  std::int64_t block_steps(std::int64_t end) const;  // of the block that starts there
  logit_score* score(std::int64_t step);             // P-1 .. T-1
  const std::vector<logit_score>& scores() const { return scores_; }  // [decode steps + 1]

  // Before a pass over the block: keeps or restores its start.
  void begin_pass(std::int64_t steps);
  // One layer of the pass; distinct layers one after the other.
  void run_layer(int slot, const layer_block& block);
  // After the scores of the block's steps are there. Moves next() where the block has settled.
  void end_pass(std::int64_t steps);

  // Mean passes that a block took to settle.
  double passes_per_block() const;
  void fail(std::string why);
  const std::string& failed() const { return failed_; }
  double seconds = 0;  // in replay_layer

  // Everything that a run changes, between two blocks.
  template <class Visit>
  void for_each_state(Visit&& visit) {
    state_.for_each_state(visit);
    visit(gate_state_);
    for (auto& norms : value_norms_) visit(norms);
    for (auto& rows : retention_) visit(rows);
    visit(measures_.steps);
    visit(measures_.prompt_evicted);
    visit(scores_);
    for (std::int64_t* n : {&next_, &span_, &passes_, &blocks_, &calm_blocks_}) visit(*n);
    visit(seconds);
    visit(failed_);
  }

 private:
  // Selection after the last step of a block waits until all layers have run: for the logits, or
  // (budgets over all layers, whose blocks are single steps) for each other.
  bool settles_late() const { return gate_.waits || state_.policy().needs.all_layers; }
  void settle_last(std::int64_t step);
  void try_again(std::int64_t steps);
  void settle_step(int slot, std::int64_t step);

  lane state_;
  std::vector<layer_inputs> inputs_;
  std::vector<std::vector<float>> value_norms_;  // [slots][positions * q_heads] or empty
  std::vector<std::vector<float>> retention_;    // [slots][positions * kv_heads] or empty
  closed_gate gate_;
  policies::gate_state gate_state_;
  lane_measures measures_;
  std::vector<logit_score> scores_;
  kept_log kept_;
  std::optional<lane> start_;  // of the block, while it iterates
  std::vector<step_events> events_;
  std::int64_t next_, span_, widest_;
  std::int64_t passes_ = 0, block_passes_ = 0, blocks_ = 0, calm_blocks_ = 0;
  std::string failed_;
};

}  // namespace kvreplay::replay
