#include "replay/open_loop.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "policies/gate.hpp"
#include "replay/open_loop_pass.hpp"
#include "replay/projection.hpp"
#include "replay/row_basics.hpp"

namespace kvreplay::replay {
namespace {

void fail(lane_output& out, std::string why) {
  out.row.status = "failed";
  out.row.note = std::move(why);
}

}  // namespace

std::vector<lane_output> open_loop_pass::run() {
  std::vector<lane_output> out(policies_.size());
  parts_.recall = parts_.output = options_.quality;
  parts_.bound = options_.quality && options_.bound;
  parts_.projected = options_.quality && std::all_of(layers_.begin(), layers_.end(), [&](int l) {
                       return std::count(model_.wo_layers.begin(), model_.wo_layers.end(), l) > 0;
                     });
  parts_.residual = parts_.projected && std::all_of(layers_.begin(), layers_.end(), [&](int l) {
                      return trace_.layer(info_.id, l).has_residual_norm;
                    });
  find_spans();
  start_lanes(out);
  residual_norm_.resize(layers_.size());
  reference_l1_.resize(layers_.size());
  layer_failed_.resize(layers_.size());
  if (any_lane(true)) run_on_device();
  const int on_host = any_lane(false) ? static_cast<int>(layers_.size()) : 0;
  tbb::parallel_for(0, on_host, [&](int slot) {
    try {
      run_layer(slot);
    } catch (const std::exception& e) {
      layer_failed_[static_cast<size_t>(slot)] = e.what();
    }
  });
  for (size_t i = 0; i < out.size(); ++i) {
    if (lanes_[i] == nullptr) continue;
    // The lowest layer's complaint, so that the message does not depend on threads.
    std::string why;
    for (size_t slot = 0; slot < layers_.size() && why.empty(); ++slot) {
      why = layer_failed_[slot].empty() ? lanes_[i]->failed[slot] : layer_failed_[slot];
    }
    if (why.empty()) {
      finish(*lanes_[i], out[i]);
    } else {
      fail(out[i], why);
    }
  }
  return out;
}

void open_loop_pass::find_spans() {
  if (!parts_.bound) return;
  for (const auto& [name, ranges] : info_.spans) {
    span_mask mask;
    mask.member.assign(static_cast<size_t>(info_.n_tokens), 0);
    for (const auto& [begin, end] : ranges) {
      for (std::int64_t t = begin; t < std::min<std::int64_t>(end, info_.n_tokens); ++t) {
        mask.member[static_cast<size_t>(t)] = 1;
      }
    }
    span_names_.push_back(name);
    spans_.push_back(std::move(mask));
  }
}

void open_loop_pass::start_lanes(std::vector<lane_output>& out) {
  for (size_t i = 0; i < policies_.size(); ++i) {
    const auto& policy = policies_[i];
    auto& row = out[i].row;
    describe_row(trace_, info_.id, policy, static_cast<int>(layers_.size()), options_.skip, "open",
                 row);
    lanes_.emplace_back();
    try {
      const std::string missing = missing_for(policy, trace_, info_.id);
      if (!missing.empty()) {
        fail(out[i], missing);
        continue;
      }
      auto lane = start_lane(policy);
      if (options_.device != nullptr) lane->host_note = host_reason(policy, shape_);
      if (options_.device != nullptr && lane->host_note.empty()) {
        lane->device = std::make_unique<device_lane>(lane->state, *options_.device);
      }
      lanes_.back() = std::move(lane);
    } catch (const std::exception& e) {
      fail(out[i], e.what());
    }
  }
}

std::unique_ptr<running_lane> open_loop_pass::start_lane(const policies::policy& policy) {
  const auto& gate = policy.budget.gate;
  auto c = confidence_for(gate);
  std::vector<std::uint8_t> tight;
  double tau = 0;
  if (policy.budget.gated) {
    tau = policies::resolve_tau(gate, c);
    tight = policies::gate_decisions(gate, info_.n_prompt, c);
  }
  const auto layers = static_cast<int>(layers_.size());
  return std::make_unique<running_lane>(running_lane{
      lane(policy, dims_for(model_), shape_, layers_, info_.n_prompt, std::move(tight)),
      lane_measures(layers, info_.n_decode(), model_.n_kv_heads, spans_.size()),
      options_.kept ? kept_log(layers, model_.n_kv_heads, info_.n_prompt) : kept_log(),
      std::vector<std::string>(layers_.size()), std::vector<double>(layers_.size()), std::move(c),
      tau});
}

const std::vector<double>& open_loop_pass::confidence_for(const policies::gate_rule& gate) {
  const std::array key{gate.w_entropy, gate.w_margin, gate.w_top, gate.temperature};
  const auto known = confidence_.find(key);
  if (known != confidence_.end()) return known->second;
  auto c = recorded_confidence(trace_, info_.id, gate);
  c.resize(std::min(c.size(), static_cast<size_t>(info_.n_decode() + 1)));
  return confidence_.emplace(key, std::move(c)).first->second;
}

// Whole rows of a block are held for all query heads: at most about 64 MiB of them.
std::int64_t open_loop_pass::block_steps() const {
  const std::int64_t row_bytes = info_.n_tokens * model_.n_q_heads * std::int64_t{sizeof(float)};
  return std::clamp<std::int64_t>((std::int64_t{64} << 20) / row_bytes, 1, options_.block);
}

void open_loop_pass::run_layer(int slot) {
  const int layer = layers_[static_cast<size_t>(slot)];
  const kernels::cache_shape own = cache_shape_for(model_, {&layer, 1});
  const auto data = load_layer(trace_, info_.id, layer);
  if (parts_.residual) {
    residual_norm_[static_cast<size_t>(slot)].assign(data.residual_norm.begin() + info_.n_prompt,
                                                     data.residual_norm.begin() + info_.n_tokens);
  }
  const projection_shape projection{model_.n_q_heads, model_.value_dim, model_.hidden_size};
  const auto weights =
      parts_.projected ? output_weights(projection, trace_.wo(layer)) : std::vector<float>{};
  reference_l1_[static_cast<size_t>(slot)].resize(static_cast<size_t>(info_.n_decode()));
  prompt_observations prompt(own, data);
  full_reference reference(
      own, data,
      {.rows = options_.quality && options_.bound, .bound = options_.quality && options_.bound});
  const auto each_lane = [&](const auto& work) {
    tbb::this_task_arena::isolate([&] {
      tbb::parallel_for(size_t{0}, lanes_.size(), [&](size_t i) {
        if (lanes_[i] == nullptr || lanes_[i]->device != nullptr) return;
        if (!lanes_[i]->failed[static_cast<size_t>(slot)].empty()) return;
        try {
          work(*lanes_[i]);
        } catch (const std::exception& e) {
          lanes_[i]->failed[static_cast<size_t>(slot)] = fmt::format(
              "{}: sequence {}, layer {}: {}", trace_.path(), info_.id, layer, e.what());
        }
      });
    });
  };
  each_lane([&](running_lane& lane) {
    const auto events = load_prompt(lane.state, slot, data, prompt);
    lane.measures.prompt_evicted[static_cast<size_t>(slot)] = events.evicted;
    lane.kept.note(lane.state.cache(), slot, info_.n_prompt - 1);
  });
  const std::int64_t block = block_steps();
  for (std::int64_t first = info_.n_prompt; first < info_.n_tokens; first += block) {
    const std::int64_t steps = std::min(block, info_.n_tokens - first);
    if (options_.quality) reference.load(first, steps);
    if (parts_.projected) {
      const auto rows =
          project(projection, weights,
                  {reference.o(first), static_cast<size_t>(steps * data.o_width)}, steps);
      for (std::int64_t i = 0; i < steps; ++i) {
        reference_l1_[static_cast<size_t>(slot)][static_cast<size_t>(first - info_.n_prompt + i)] =
            rows[static_cast<size_t>(i)].l1;
      }
    }
    each_lane([&](running_lane& lane) {
      run_lane_block(lane, slot, data, reference, weights, first, steps, own);
    });
    report_progress(steps);
  }
}

void open_loop_pass::run_lane_block(running_lane& lane, int slot, const layer_data& data,
                                    const full_reference& reference, std::span<const float> weights,
                                    std::int64_t first, std::int64_t steps,
                                    const kernels::cache_shape& own) {
  using clock = std::chrono::steady_clock;
  const auto start = clock::now();
  std::vector<float> o(static_cast<size_t>(steps * data.o_width));
  std::vector<step_events> events(static_cast<size_t>(steps));
  step_observation observation(own, data, reference, spans_, parts_, options_.skip);
  layer_block block{first, steps, data.q_at(first), data.k_at(first), data.v_at(first), o.data()};
  step_observer observe;
  if (options_.quality) {
    observe = [&](std::int64_t t, const float* out, const float* lse, const step_events&) {
      observation(lane.state, slot, t, out, lse, lane.measures);
    };
  }
  kept_observer kept;
  if (options_.kept) kept = [&](std::int64_t t) { lane.kept.note(lane.state.cache(), slot, t); };
  replay_layer(lane.state, slot, block, events, observe, kept);
  for (std::int64_t i = 0; i < steps; ++i) {
    take_events(events[static_cast<size_t>(i)], lane.measures.at(slot, first - info_.n_prompt + i));
  }
  if (parts_.projected) project_block(lane, slot, reference, weights, o, first, steps);
  lane.seconds[static_cast<size_t>(slot)] +=
      std::chrono::duration<double>(clock::now() - start).count();
}

void open_loop_pass::project_block(running_lane& lane, int slot, const full_reference& reference,
                                   std::span<const float> weights, std::span<const float> o,
                                   std::int64_t first, std::int64_t steps) {
  std::vector<float> error(o.size());
  const float* expected = reference.o(first);
  for (size_t i = 0; i < o.size(); ++i) error[i] = o[i] - expected[i];
  const auto rows =
      project({model_.n_q_heads, model_.value_dim, model_.hidden_size}, weights, error, steps);
  for (std::int64_t i = 0; i < steps; ++i) {
    const std::int64_t t = first - info_.n_prompt + i;
    auto& at = lane.measures.at(slot, t);
    const auto& row = rows[static_cast<size_t>(i)];
    at.residual_error2 = row.norm2;
    at.projected_error_l1 = row.l1;
    at.head_l1_sum = row.head_l1_sum;
    at.projected_reference_l1 = reference_l1_[static_cast<size_t>(slot)][static_cast<size_t>(t)];
  }
}

void open_loop_pass::report_progress(std::int64_t steps) {
  if (!options_.progress) return;
  const std::scoped_lock lock(progress_mutex_);
  progress_done_ += steps;
  const int passes = (any_lane(false) ? 1 : 0) + (any_lane(true) ? 1 : 0);
  options_.progress(progress_done_,
                    passes * info_.n_decode() * static_cast<std::int64_t>(layers_.size()));
}

std::vector<lane_output> replay_open(const traces::reader& trace, int sequence,
                                     std::span<const policies::policy> policies,
                                     const open_loop_options& options) {
  return open_loop_pass(trace, sequence, policies, options).run();
}

}  // namespace kvreplay::replay
