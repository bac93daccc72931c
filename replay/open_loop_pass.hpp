// One pass of the open loop over a sequence: shared by open_loop.cpp, which runs it, and
// open_loop_rows.cpp, which turns what was measured into rows.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "replay/bind.hpp"
#include "replay/device_lane.hpp"
#include "replay/direct.hpp"
#include "replay/full_reference.hpp"
#include "replay/layer_data.hpp"
#include "replay/measures.hpp"
#include "replay/observe.hpp"
#include "replay/open_loop.hpp"
#include "replay/projection.hpp"
#include "replay/replay_layer.hpp"

namespace kvreplay::replay {

// One policy on its way through the pass.
struct running_lane {
  lane state;
  lane_measures measures;
  kept_log kept;
  std::vector<std::string> failed;  // [layers], empty: fine
  std::vector<double> seconds;      // [layers]
  std::vector<double> confidence;   // [decode steps + 1] or empty
  double tau = 0;
  std::vector<float> image_worth = {};  // [n_tokens] of a policy that ranks images by one layer
  std::unique_ptr<device_lane> device = {};   // null: on the host
  std::string host_note = {};                 // why there, where a device was offered
  std::unique_ptr<direct_error> direct = {};  // null: not measured
};

class open_loop_pass {
 public:
  open_loop_pass(const traces::reader& trace, int sequence,
                 std::span<const policies::policy> policies, const open_loop_options& options)
      : trace_(trace),
        info_(first_steps(trace.sequence(sequence), options.steps)),
        model_(trace.model()),
        policies_(policies.begin(), policies.end()),
        asked_(policies.size()),
        options_(options),
        layers_(model_.layers),
        shape_(cache_shape_for(model_, layers_)) {}

  std::vector<lane_output> run();

 private:
  static traces::sequence_info first_steps(traces::sequence_info info, std::int64_t steps) {
    if (steps > 0)
      info.n_tokens = std::min<decltype(info.n_tokens)>(info.n_tokens, info.n_prompt + steps);
    return info;
  }
  void add_bases();
  void start_lanes(std::vector<lane_output>& out);
  void decide_global(std::vector<lane_output>& out);
  void find_images(running_lane& lane) const;
  layer_inputs inputs_for(const running_lane& lane, int slot, const layer_data& data,
                          const layer_inputs& shared) const;
  std::unique_ptr<running_lane> start_lane(const policies::policy& policy);
  const std::vector<double>& confidence_for(const policies::gate_rule& gate);
  void find_spans();
  void run_layer(int slot);
  std::vector<float> run_lane_block(running_lane& lane, int slot, const layer_data& data,
                                    const full_reference& reference, const layer_inputs& inputs,
                                    std::span<const float> weights, std::int64_t first,
                                    std::int64_t steps, const kernels::cache_shape& own);
  bool can_score_direct() const;
  void score_direct_lanes(std::vector<lane_output>& out);
  void note_update_error(std::span<const float> update, std::span<const float> full_update,
                         running_lane& lane, int slot, std::int64_t first) const;
  void project_block(running_lane& lane, int slot, const full_reference& reference,
                     std::span<const float> weights, std::span<const float> o, std::int64_t first,
                     std::int64_t steps);
  void report_progress(std::int64_t steps);
  // open_loop_device.cpp
  struct device_layer;
  using device_group = std::vector<std::unique_ptr<device_layer>>;
  bool any_lane(bool on_device) const;
  int layers_at_once() const;
  void run_on_device();
  void run_device_group(const device_group& group);
  void run_device_block(running_lane& lane, const device_group& group, std::int64_t first,
                        std::int64_t steps);
  void project_reference(const device_layer& layer, std::int64_t first, std::int64_t steps);
  void each_device_lane(const std::function<void(running_lane&)>& work);
  projection_shape projection() const {
    return {model_.n_q_heads, model_.value_dim, model_.hidden_size};
  }
  std::int64_t block_steps() const;
  void finish(const running_lane& lane, lane_output& out) const;
  void finish_critical(size_t index, reports::result& row) const;
  void finish_spans(const running_lane& lane, reports::result& row) const;
  void finish_rows(const running_lane& lane, lane_output& out) const;
  reduce_context context_for(const running_lane& lane) const;

  const traces::reader& trace_;
  const traces::sequence_info info_;  // cut where only the first steps are run
  const traces::model_info& model_;
  std::vector<policies::policy> policies_;  // those asked for, then the bases of critical ones
  size_t asked_;
  const open_loop_options& options_;
  std::vector<int> layers_;
  kernels::cache_shape shape_;
  measured_parts parts_;
  std::vector<std::string> span_names_;
  std::vector<span_mask> spans_;
  std::vector<std::uint8_t> image_;                   // [n_tokens] 1: in a span `image`; or empty
  std::vector<std::unique_ptr<running_lane>> lanes_;  // [policies], null: refused
  std::vector<std::vector<float>> residual_norm_;     // [layers][decode steps]
  std::vector<std::vector<double>> reference_l1_;     // [layers][decode steps]
  std::vector<std::string> layer_failed_;
  // By weights and temperature: policies share one pass over the logits.
  std::map<std::array<double, 4>, std::vector<double>> confidence_;
  std::mutex progress_mutex_;
  std::int64_t progress_done_ = 0;
};

}  // namespace kvreplay::replay
