#include "replay/open_loop.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "policies/gate.hpp"
#include "replay/future_mass.hpp"
#include "replay/global_pass.hpp"
#include "replay/open_loop_pass.hpp"
#include "replay/policy_files.hpp"
#include "replay/projection.hpp"
#include "replay/row_basics.hpp"

namespace kvreplay::replay {
namespace {

void fail(lane_output& out, std::string why) {
  out.row.status = "failed";
  out.row.note = std::move(why);
}

void add_critical(const step_events& events, critical_measure& sum) {
  sum.heads += events.critical_heads;
  sum.over_half += events.critical_over_half;
}

// What the lanes that look ahead need of a layer, computed once for all of them; null: nobody does.
std::unique_ptr<future_mass> future_for(std::span<const std::unique_ptr<running_lane>> lanes,
                                        const kernels::cache_shape& shape, const layer_data& data) {
  std::vector<kernels::mass_layout> layouts;
  for (const auto& lane : lanes) {
    if (lane == nullptr) continue;
    const auto& score = lane->state.policy().score;
    if (score.kind == policies::score_kind::future) layouts.push_back(layout_of(score));
  }
  return layouts.empty() ? nullptr : std::make_unique<future_mass>(shape, data, layouts);
}

}  // namespace

std::vector<lane_output> open_loop_pass::run() {
  const bool has_keys = trace_.layer(info_.id, layers_.front()).has_q;
  parts_.recall = options_.quality;
  parts_.output = options_.quality && has_keys;
  parts_.bound = options_.quality && options_.bound;
  parts_.projected = parts_.output && std::all_of(layers_.begin(), layers_.end(), [&](int l) {
                       return std::count(model_.wo_layers.begin(), model_.wo_layers.end(), l) > 0;
                     });
  parts_.residual = parts_.projected && std::all_of(layers_.begin(), layers_.end(), [&](int l) {
                      return trace_.layer(info_.id, l).has_residual_norm;
                    });
  find_spans();
  add_bases();
  std::vector<lane_output> out(policies_.size());
  start_lanes(out);
  decide_global(out);
  for (auto& lane : lanes_) {
    if (lane == nullptr || lane->device != nullptr || !can_score_direct()) continue;
    lane->direct = std::make_unique<direct_error>(info_.n_decode(), model_.hidden_size);
  }
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
  for (size_t i = 0; i < asked_; ++i) {
    if (out[i].row.status == "ok" && parts_.projected) finish_critical(i, out[i].row);
  }
  score_direct_lanes(out);
  out.resize(asked_);
  return out;
}

bool open_loop_pass::can_score_direct() const {
  if (options_.model == nullptr || !parts_.output || !model_.records_all_layers() ||
      !info_.has_residual_final || info_.n_decode() < 1) {
    return false;
  }
  const auto& at = info_.logit_pos;
  const auto first = std::lower_bound(at.begin(), at.end(), info_.n_prompt);
  return at.end() - first >= info_.n_decode() && *first == info_.n_prompt &&
         first[info_.n_decode() - 1] == info_.n_tokens - 1;
}

void open_loop_pass::score_direct_lanes(std::vector<lane_output>& out) {
  std::vector<direct_lane> lanes;
  for (size_t i = 0; i < asked_; ++i) {
    if (lanes_[i] == nullptr || lanes_[i]->direct == nullptr || out[i].row.status != "ok") continue;
    lanes.push_back({lanes_[i]->direct.get(), &out[i].row});
  }
  if (!lanes.empty()) score_direct(trace_, info_, *options_.model, options_.skip, lanes);
}

// What `critical` improved shows beside the same policy without it, which runs along unseen where
// it was not asked for.
void open_loop_pass::add_bases() {
  for (size_t i = 0; i < asked_ && parts_.projected; ++i) {
    if (!policies_[i].critical.on) continue;
    auto base = policies::without_modifier(policies_[i], "critical");
    const bool there = std::any_of(policies_.begin(), policies_.end(),
                                   [&](const auto& p) { return p.resolved == base.resolved; });
    if (!there) policies_.push_back(std::move(base));
  }
}

void open_loop_pass::find_spans() {
  for (const auto& [name, ranges] : info_.spans) {
    if (!parts_.bound && name != "image") continue;
    span_mask mask;
    mask.member.assign(static_cast<size_t>(info_.n_tokens), 0);
    for (const auto& [begin, end] : ranges) {
      for (std::int64_t t = begin; t < std::min<std::int64_t>(end, info_.n_tokens); ++t) {
        mask.member[static_cast<size_t>(t)] = 1;
      }
    }
    if (name == "image") image_ = mask.member;
    if (!parts_.bound) continue;
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
      auto lane = start_lane(
          with_files(policy, model_.n_layers, model_.n_q_heads, model_.n_kv_heads, info_.id));
      if (options_.device != nullptr) {
        lane->host_note = trace_.layer(info_.id, layers_.front()).has_q
                              ? host_reason(policy, shape_)
                              : "on the CPU: the trace has attention alone";
      }
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
  auto started = std::make_unique<running_lane>(running_lane{
      lane(policy, dims_for(model_), shape_, layers_, info_.n_prompt, std::move(tight)),
      lane_measures(layers, info_.n_decode(), model_.n_kv_heads, spans_.size()),
      options_.kept ? kept_log(layers, model_.n_kv_heads, info_.n_prompt) : kept_log(),
      std::vector<std::string>(layers_.size()),
      std::vector<double>(layers_.size()),
      std::move(c),
      tau,
      {}});
  if (parts_.projected) {
    started->measures.head_l1.assign(layers_.size() * static_cast<size_t>(model_.n_q_heads), 0.0);
  }
  if (policy.score.kind == policies::score_kind::image) find_images(*started);
  return started;
}

// FastV ranks image positions by the attention of the prompt's last row in the layer before its
// own, mean over the query heads.
void open_loop_pass::find_images(running_lane& lane) const {
  const auto& rule = lane.state.policy().image;
  if (rule.dominant >= 0) return;
  const int layer = rule.layer - 1;
  const kernels::cache_shape own = cache_shape_for(model_, {&layer, 1});
  const auto data = load_layer(trace_, info_.id, layer);
  std::vector<float> rows(static_cast<size_t>(own.q_heads * info_.n_prompt)), mean;
  full_rows_of(own, data, info_.n_prompt - 1, 1, info_.n_prompt, rows.data());
  reduce_row(own, rows.data(), info_.n_prompt, info_.n_prompt, kernels::mass_layout::layer_mean,
             mean);
  mean.resize(static_cast<size_t>(info_.n_prompt));
  lane.image_worth = std::move(mean);
}

layer_inputs open_loop_pass::inputs_for(const running_lane& lane, int slot, const layer_data& data,
                                        const layer_inputs& shared) const {
  layer_inputs inputs = shared;
  const auto& policy = lane.state.policy();
  if (policy.score.kind != policies::score_kind::image) return inputs;
  inputs.image = image_;
  if (policy.image.dominant >= 0) {
    inputs.image_worth = data.image_score;
  } else if (layers_[static_cast<size_t>(slot)] >= policy.image.layer) {
    inputs.image_worth = lane.image_worth;
  }
  return inputs;
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
  const auto any_lane = [&](const auto& is) {
    return std::any_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) {
      return lane != nullptr && is(lane->state.policy());
    });
  };
  const auto data = load_layer(trace_, info_.id, layer,
                               any_lane([](const auto& p) { return p.needs.value_norm; }));
  const bool recorded = data.q.empty();
  if (parts_.residual) {
    residual_norm_[static_cast<size_t>(slot)].assign(data.residual_norm.begin() + info_.n_prompt,
                                                     data.residual_norm.begin() + info_.n_tokens);
  }
  const projection_shape projection{model_.n_q_heads, model_.value_dim, model_.hidden_size};
  const auto weights =
      parts_.projected ? output_weights(projection, trace_.wo(layer)) : std::vector<float>{};
  reference_l1_[static_cast<size_t>(slot)].resize(static_cast<size_t>(info_.n_decode()));
  prompt_observations prompt(own, data);
  layer_inputs inputs = inputs_of(data);
  const auto future = future_for(lanes_, own, data);
  inputs.future = future.get();
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
  std::int64_t credited = 0;  // prompt positions that progress has been told of
  prompt.on_progress([&](double share) {
    const auto due = static_cast<std::int64_t>(share * static_cast<double>(info_.n_prompt));
    if (due <= credited) return;
    report_progress(due - credited);
    credited = due;
  });
  each_lane([&](running_lane& lane) {
    const auto events =
        load_prompt(lane.state, slot, data, prompt, inputs_for(lane, slot, data, inputs));
    lane.measures.prompt_evicted[static_cast<size_t>(slot)] = events.evicted;
    lane.measures.prompt_degenerate[static_cast<size_t>(slot)] = events.degenerate ? 1 : 0;
    lane.kept.note(lane.state.cache(), slot, info_.n_prompt - 1);
    add_critical(events, lane.measures.critical[static_cast<size_t>(slot)]);
  });
  report_progress(info_.n_prompt - credited);
  const std::int64_t block = block_steps();
  for (std::int64_t first = info_.n_prompt; first < info_.n_tokens; first += block) {
    const std::int64_t steps = std::min(block, info_.n_tokens - first);
    if (options_.quality || recorded) reference.load(first, steps);
    if (future != nullptr) future->load(first, steps);
    if (parts_.projected) {
      const auto rows =
          project(projection, weights,
                  {reference.o(first), static_cast<size_t>(steps * data.o_width)}, steps);
      for (std::int64_t i = 0; i < steps; ++i) {
        reference_l1_[static_cast<size_t>(slot)][static_cast<size_t>(first - info_.n_prompt + i)] =
            rows[static_cast<size_t>(i)].l1;
      }
    }
    const auto full_update =
        can_score_direct()
            ? options_.model->attention_update(
                  layer, {reference.o(first), static_cast<size_t>(steps * data.o_width)}, steps)
            : std::vector<float>{};
    each_lane([&](running_lane& lane) {
      const auto o =
          run_lane_block(lane, slot, data, reference, inputs_for(lane, slot, data, inputs), weights,
                         first, steps, own);
      if (lane.direct == nullptr) return;
      const auto update = options_.model->attention_update(layer, o, steps);
      lane.direct->add(first - info_.n_prompt, update, full_update);
      if (options_.model->config().post_norms) {
        note_update_error(update, full_update, lane, slot, first);
      }
    });
    report_progress(steps);
  }
}

// Returns o^, [steps, q_heads, value_dim].
std::vector<float> open_loop_pass::run_lane_block(
    running_lane& lane, int slot, const layer_data& data, const full_reference& reference,
    const layer_inputs& inputs, std::span<const float> weights, std::int64_t first,
    std::int64_t steps, const kernels::cache_shape& own) {
  using clock = std::chrono::steady_clock;
  const auto start = clock::now();
  std::vector<float> o(static_cast<size_t>(steps * data.o_width));
  std::vector<step_events> events(static_cast<size_t>(steps));
  step_observation observation(own, data, reference, spans_, parts_, options_.skip);
  layer_block block;
  block.first = first;
  block.steps = steps;
  block.inputs = &inputs;
  block.o = o.data();
  if (data.q.empty()) {
    block.rows = reference.rows(first);
    block.row_stride = reference.row_stride();
  } else {
    block.q = data.q_at(first);
    block.k = data.k_at(first);
    block.v = data.v_at(first);
  }
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
    const auto& e = events[static_cast<size_t>(i)];
    take_events(e, lane.measures.at(slot, first - info_.n_prompt + i));
    add_critical(e, lane.measures.critical[static_cast<size_t>(slot)]);
  }
  if (parts_.projected) project_block(lane, slot, reference, weights, o, first, steps);
  lane.seconds[static_cast<size_t>(slot)] +=
      std::chrono::duration<double>(clock::now() - start).count();
  return o;
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
    at.head_l1_sum = std::accumulate(row.head_l1.begin(), row.head_l1.end(), 0.0);
    at.projected_reference_l1 = reference_l1_[static_cast<size_t>(slot)][static_cast<size_t>(t)];
    if (t < options_.skip) continue;
    for (int h = 0; h < model_.n_q_heads; ++h) {
      const double l1 = row.head_l1[static_cast<size_t>(h)];
      lane.measures.head_l1[static_cast<size_t>(slot * model_.n_q_heads + h)] += l1;
      lane.measures.heads[static_cast<size_t>(slot * model_.n_kv_heads + h / model_.group())].l1 +=
          l1;
    }
  }
}

// Lanes whose budget spans all layers are decided first, so that the layers may then run as they
// always do.
void open_loop_pass::decide_global(std::vector<lane_output>& out) {
  std::vector<lane*> coupled;
  std::vector<size_t> index;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i] == nullptr || !lanes_[i]->state.policy().needs.all_layers) continue;
    coupled.push_back(&lanes_[i]->state);
    index.push_back(i);
  }
  if (coupled.empty()) return;
  const auto failed = decide_global_lanes(trace_, info_.id, coupled);
  for (size_t i = 0; i < coupled.size(); ++i) {
    if (failed[i].empty()) continue;
    fail(out[index[i]], failed[i]);
    lanes_[index[i]] = nullptr;
  }
}

// Behind a norm of what attention adds, W_O (o^ - o) is not what the residual stream sees.
void open_loop_pass::note_update_error(std::span<const float> update,
                                       std::span<const float> full_update, running_lane& lane,
                                       int slot, std::int64_t first) const {
  const auto hidden = static_cast<size_t>(model_.hidden_size);
  for (size_t row = 0; row < update.size() / hidden; ++row) {
    double squares = 0;
    for (size_t i = row * hidden; i < (row + 1) * hidden; ++i) {
      const double x = static_cast<double>(update[i]) - full_update[i];
      squares += x * x;
    }
    lane.measures.at(slot, first - info_.n_prompt + static_cast<std::int64_t>(row))
        .residual_error2 = squares;
  }
}

void open_loop_pass::report_progress(std::int64_t steps) {
  if (!options_.progress) return;
  const std::scoped_lock lock(progress_mutex_);
  progress_done_ += steps;
  const int passes = (any_lane(false) ? 1 : 0) + (any_lane(true) ? 1 : 0);
  options_.progress(progress_done_,
                    passes * info_.n_tokens * static_cast<std::int64_t>(layers_.size()));
}

std::vector<lane_output> replay_open(const traces::reader& trace, int sequence,
                                     std::span<const policies::policy> policies,
                                     const open_loop_options& options) {
  return open_loop_pass(trace, sequence, policies, options).run();
}

}  // namespace kvreplay::replay
