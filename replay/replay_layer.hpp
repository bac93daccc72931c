// replay_layer: the unit of work. One layer over a block of steps: given q, k and v of those steps,
// run a policy's cache over them in order and give back o. Open loop, closed loop and recording all
// come down to it.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/kv_cache.hpp"
#include "policies/budget.hpp"
#include "replay/bind.hpp"
#include "replay/host_rule.hpp"
#include "replay/layer_data.hpp"
#include "replay/layer_inputs.hpp"

namespace kvreplay::replay {

// One policy over one sequence: the cache of all its layers and the rules that drive it. Copying it
// is a snapshot. Distinct layers may be advanced by distinct threads.
class lane {
 public:
  // `layers` are model numbers; slot i of the cache is layers[i]. `tight` has one decision per step
  // from P-1 on (empty for ungated policies). `tail`: fp32 stores what it is given, for checks.
  lane(const policies::policy& policy, const policies::model_dims& dims,
       const kernels::cache_shape& shape, std::vector<int> layers, std::int64_t n_prompt,
       std::vector<std::uint8_t> tight, kernels::tail_format tail = kernels::tail_format::fp16);

  const policies::policy& policy() const { return policy_; }
  const policies::budget_plan& plan() const { return plan_; }
  const kernel_rules& rules() const { return rules_; }
  kernels::kv_cache& cache() { return cache_; }
  const kernels::kv_cache& cache() const { return cache_; }
  int model_layer(int slot) const { return layers_[static_cast<size_t>(slot)]; }
  std::int64_t n_prompt() const { return n_prompt_; }
  bool tight(std::int64_t step) const {
    return !tight_.empty() && tight_[static_cast<size_t>(step - (n_prompt_ - 1))] != 0;
  }
  // Replaces the decision of a step, of those given at the start.
  void decide(std::int64_t step, bool tight) {
    tight_.at(static_cast<size_t>(step - (n_prompt_ - 1))) = tight ? 1 : 0;
  }
  // The rule of a slot whose score no kernel keeps, else null. Shared by nobody, copied with the
  // lane.
  host_rule* rule(int slot) const { return host_rules_[static_cast<size_t>(slot)].get(); }
  // How a step's mass is wanted: none also where nothing after the prompt reads it.
  kernels::mass_layout step_mass() const {
    return policy_.trigger.prefill_only ? kernels::mass_layout::none : rules_.mass;
  }

  // Under a budget over all layers: how many entries each (slot, KV head) keeps after a step,
  // decided by who saw all layers (selection.hpp). Steps come in order from P-1 on, or are decided
  // anew.
  void decide_counts(std::int64_t step, std::span<const int> counts);
  std::span<const int> counts(std::int64_t step) const;
  int count(std::int64_t step, int slot, int kv_head) const {
    return counts(step)[static_cast<size_t>(slot * cache_.shape().kv_heads + kv_head)];
  }
  // Everything that a run changes, as kv_cache::for_each_state has it, but for host rules.
  template <class Visit>
  void for_each_state(Visit&& visit) {
    visit(tight_);
    visit(counts_);
    cache_.for_each_state(visit);
  }

 private:
  policies::policy policy_;
  policies::budget_plan plan_;
  kernel_rules rules_;
  std::vector<int> layers_;
  std::int64_t n_prompt_;
  std::vector<std::uint8_t> tight_;
  kernels::kv_cache cache_;
  std::vector<rule_ptr> host_rules_;  // [slots]
  std::vector<int> counts_;           // [steps from P-1 on, slots, kv_heads]
};

// Microseconds in the kernels of one layer's step; select includes compact.
struct kernel_times {
  float append = 0, attend = 0, update_scores = 0, select = 0, age = 0;
};

// What happened to one layer at one step beside o.
struct step_events {
  std::int64_t bytes = 0;  // payload over S(t), t included
  std::int64_t state_bytes = 0;
  int entries = 0;           // sum over KV heads of |S(t)|
  int evicted = 0;           // by the selection after the step
  std::int64_t budget = -1;  // sum over KV heads of what may stay after the step; -1: no selection
                             // ran, or everything may stay
  bool degenerate = false;
  kernel_times us;
  int critical_heads = 0, critical_over_half = 0;  // KV heads in which two stages selected, and
                                                   // those whose first holds over half of the mass
};

// Rows of the steps first .. first + steps - 1.
struct layer_block {
  std::int64_t first = 0, steps = 0;
  const float* q = nullptr;              // [steps, q_heads, head_dim]
  const float* k = nullptr;              // [steps, kv_heads, head_dim]
  const float* v = nullptr;              // [steps, kv_heads, value_dim]
  float* o = nullptr;                    // [steps, q_heads, value_dim], filled
  const layer_inputs* inputs = nullptr;  // what score rules read; null: nothing
  // In place of q, k, v and o: recorded probability rows [steps, q_heads, row_stride].
  const float* rows = nullptr;
  std::int64_t row_stride = 0;
  bool settle_last = true;  // false: selection and ageing after the last step are the caller's
};

// Called while S(t) stands, between attention and selection, with the step's o and lse [q_heads]
// (null without q, k, v).
using step_observer =
    std::function<void(std::int64_t step, const float* o, const float* lse, const step_events&)>;
// Called after ageing (step 7), P-1 included.
using kept_observer = std::function<void(std::int64_t step)>;

// Fills the cache of one slot with the prompt and lets the score rule see the prompt's attention.
void fill_prompt(lane& lane, int slot, const layer_data& data, prompt_observations& prompt,
                 const layer_inputs& inputs);

// Selection (step 6) and ageing (step 7) after a step, P-1 included: evicted, budget, degenerate
// and critical counts of `events` are set.
void settle(lane& lane, int slot, std::int64_t step, step_events& events,
            const layer_inputs& inputs);

// fill_prompt, then settle as if after position P-1. Returns that selection's events.
step_events load_prompt(lane& lane, int slot, const layer_data& data, prompt_observations& prompt,
                        const layer_inputs& inputs);

// One step up to the selection: append, attend, observe, update scores. i counts from block.first.
void attend_step(lane& lane, int slot, const layer_block& block, std::int64_t i, step_events& at,
                 const step_observer& observe = {});

// Runs the block. events [steps] is filled; the observers may be empty.
void replay_layer(lane& lane, int slot, const layer_block& block, std::span<step_events> events,
                  const step_observer& observe = {}, const kept_observer& kept = {});

}  // namespace kvreplay::replay
