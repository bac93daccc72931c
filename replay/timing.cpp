#include "replay/timing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "kernels/reference.hpp"
#include "policies/gate.hpp"
#include "replay/bind.hpp"
#include "replay/layer_data.hpp"
#include "replay/policy_files.hpp"
#include "replay/replay_layer.hpp"
#include "replay/timing_parts.hpp"

namespace kvreplay::replay {
namespace {

// How far an output may be from attention over unrounded keys and values, relative in L2: what the
// stored precision explains, and no more than a wrong kernel would exceed.
double tolerance_for(const policies::precision_rule& precision) {
  switch (precision.body) {
    case policies::body_kind::none:
      return 2e-3;
    case policies::body_kind::int8:
      return 0.15;
    case policies::body_kind::int4:
      return 0.6;
  }
  return 0;
}

// ||o - reference|| / ||reference|| over the heads of the layer, for the entries held.
double error_of(const kernels::cache_shape& shape, const lane& lane, int slot,
                const layer_data& data, std::int64_t t, const float* o) {
  double error2 = 0, reference2 = 0;
  for (int h = 0; h < shape.q_heads; ++h) {
    const int g = h / shape.group();
    std::vector<double> k, v;
    for (const auto p : lane.cache().positions(slot, g)) {
      const float* key = data.k_at(p) + std::int64_t{g} * shape.head_dim;
      const float* value = data.v_at(p) + std::int64_t{g} * shape.value_dim;
      k.insert(k.end(), key, key + shape.head_dim);
      v.insert(v.end(), value, value + shape.value_dim);
    }
    const float* q = data.q_at(t) + std::int64_t{h} * shape.head_dim;
    const double sink = shape.sink_logits.empty() ? 0 : shape.sink_logits[static_cast<size_t>(h)];
    const auto expected =
        kernels::reference_attend(std::vector<double>(q, q + shape.head_dim), k, v, shape.value_dim,
                                  shape.softmax_scale, shape.sink_logits.empty() ? nullptr : &sink);
    for (int c = 0; c < shape.value_dim; ++c) {
      const double want = expected.o[static_cast<size_t>(c)];
      const double got = o[std::int64_t{h} * shape.value_dim + c];
      error2 += (got - want) * (got - want);
      reference2 += want * want;
    }
  }
  return reference2 == 0 ? std::sqrt(error2) : std::sqrt(error2 / reference2);
}

constexpr std::int64_t fewest_samples = 30;
constexpr std::int64_t memory_bytes = std::int64_t{256} << 20;

double percentile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const auto rank = std::ceil(q * static_cast<double>(values.size()));
  return values[static_cast<size_t>(std::max(1.0, rank)) - 1];
}

template <class Field>
std::vector<double> column(const std::vector<step_sample>& samples, Field field) {
  std::vector<double> out;
  for (const auto& s : samples) out.push_back(field(s));
  return out;
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// Why a policy cannot be timed one layer at a time, from the kernels it would run; empty: it can.
std::string untimed(const policies::policy& policy) {
  const auto& needs = policy.needs;
  const bool looks_ahead = policy.score.kind == policies::score_kind::future;
  if (!looks_ahead && !needs.all_layers && !needs.image_span && !policy.rerotate) return {};
  return fmt::format("{} is not timed: {}", policy.name,
                     looks_ahead        ? "it reads the future"
                     : needs.all_layers ? "it has one budget over all layers"
                     : policy.rerotate  ? "rerotate attends in FP32 on the host"
                                        : "it ranks by another layer or an image encoder");
}

class timing_run {
 public:
  timing_run(const traces::reader& trace, int sequence, const timing_options& options)
      : trace_(trace),
        info_(trace.sequence(sequence)),
        model_(trace.model()),
        options_(options),
        rounds_(static_cast<int>(std::max<std::int64_t>(
            options.repeat, (fewest_samples + info_.n_decode() - 1) / info_.n_decode()))) {}

  std::vector<reports::result> run(std::span<const policies::policy> policies);

 private:
  void start(timed_lane& lane);
  void run_layer(int layer);
  lane loaded_lane(const timed_lane& timed, int layer, const kernels::cache_shape& own,
                   const layer_data& data, prompt_observations& prompt) const;
  void check(timed_lane& timed, lane state, const kernels::cache_shape& own,
             const layer_data& data) const;
  void time_layer(timed_lane& timed, size_t which, const lane& loaded, const layer_data& data);
  reports::result row_for(const timed_lane& timed, size_t which) const;
  double bandwidth(std::int64_t bytes) const {
    return options_.device != nullptr ? options_.device->copy_bandwidth(bytes)
                                      : copy_bandwidth(bytes);
  }
  layer_block step_of(const layer_data& data, std::int64_t t, float* o) const {
    return {t, 1, data.q_at(t), data.k_at(t), data.v_at(t), o, &inputs_};
  }

  const traces::reader& trace_;
  const traces::sequence_info& info_;
  const traces::model_info& model_;
  const timing_options& options_;
  int rounds_;
  policies::policy full_ = policies::parse_policy("full");
  layer_inputs inputs_;            // of the layer being timed
  std::vector<timed_lane> lanes_;  // the full cache first, then as given
  std::int64_t layers_done_ = 0;
  double memory_bandwidth_ = 0;
};

void timing_run::start(timed_lane& lane) {
  lane.samples.assign(options_.batch.size(),
                      std::vector<step_sample>(static_cast<size_t>(rounds_ * info_.n_decode())));
  lane.failed = missing_for(*lane.policy, trace_, info_.id);
  if (lane.failed.empty()) lane.failed = untimed(*lane.policy);
  const auto& budget = lane.policy->budget;
  if (!lane.failed.empty() || !budget.gated) return;
  lane.tight = policies::gate_decisions(budget.gate, info_.n_prompt,
                                        recorded_confidence(trace_, info_.id, budget.gate));
}

lane timing_run::loaded_lane(const timed_lane& timed, int layer, const kernels::cache_shape& own,
                             const layer_data& data, prompt_observations& prompt) const {
  lane out(
      with_files(*timed.policy, model_.n_layers, model_.n_q_heads, model_.n_kv_heads, info_.id),
      dims_for(model_), own, {layer}, info_.n_prompt, timed.tight);
  load_prompt(out, 0, data, prompt, inputs_);
  return out;
}

// Runs the layer once, untimed, and compares the first, the middle and the last step.
void timing_run::check(timed_lane& timed, lane state, const kernels::cache_shape& own,
                       const layer_data& data) const {
  const std::int64_t steps = info_.n_decode();
  std::vector<float> o(static_cast<size_t>(data.o_width));
  for (std::int64_t i = 0; i < steps; ++i) {
    const std::int64_t t = info_.n_prompt + i;
    const bool compare = i == 0 || i == steps / 2 || i == steps - 1;
    step_events events;
    step_observer observe;
    if (compare) {
      observe = [&](std::int64_t, const float* out, const float*, const step_events&) {
        check_output(own, state, 0, data, t, out);
      };
    }
    replay_layer(state, 0, step_of(data, t, o.data()), {&events, 1}, observe);
    timed.entries += static_cast<double>(events.entries) / model_.n_kv_heads;
    timed.bytes += static_cast<double>(events.bytes);
  }
}

void timing_run::time_layer(timed_lane& timed, size_t which, const lane& loaded,
                            const layer_data& data) {
  const int batch = options_.batch[which];
  std::vector<float> o(static_cast<size_t>(data.o_width));
  for (int round = 0; round < rounds_; ++round) {
    std::vector<lane> lanes(static_cast<size_t>(batch), loaded);
    for (std::int64_t i = 0; i < info_.n_decode(); ++i) {
      auto& sample = timed.samples[which][static_cast<size_t>(round * info_.n_decode() + i)];
      for (auto& lane : lanes) {
        step_events events;
        replay_layer(lane, 0, step_of(data, info_.n_prompt + i, o.data()), {&events, 1});
        sample.append += static_cast<double>(events.us.append);
        sample.attend += static_cast<double>(events.us.attend);
        sample.update_scores += static_cast<double>(events.us.update_scores);
        sample.select += static_cast<double>(events.us.select);
        sample.age += static_cast<double>(events.us.age);
        sample.bytes += static_cast<double>(events.bytes);
        ++timed.launches;
        if (events.us.attend < short_launch_us) ++timed.short_launches;
      }
    }
  }
}

void timing_run::run_layer(int layer) {
  using clock = std::chrono::steady_clock;
  const kernels::cache_shape own = cache_shape_for(model_, {&layer, 1});
  const bool value_norm = std::any_of(lanes_.begin(), lanes_.end(), [](const timed_lane& l) {
    return l.failed.empty() && l.policy->needs.value_norm;
  });
  const auto data = load_layer(trace_, info_.id, layer, value_norm);
  inputs_ = inputs_of(data);
  prompt_observations prompt(own, data);
  for (auto& timed : lanes_) {
    if (!timed.failed.empty()) continue;
    const auto begin = clock::now();
    try {
      const lane loaded = loaded_lane(timed, layer, own, data, prompt);
      check(timed, loaded, own, data);
      for (size_t b = 0; b < options_.batch.size(); ++b) time_layer(timed, b, loaded, data);
    } catch (const std::exception& e) {
      timed.failed = fmt::format("{}: sequence {}: {}", trace_.path(), info_.id, e.what());
    }
    timed.wall_s += std::chrono::duration<double>(clock::now() - begin).count();
  }
  ++layers_done_;
  if (options_.progress) options_.progress(layers_done_, std::ssize(model_.layers));
}

reports::result timing_run::row_for(const timed_lane& timed, size_t which) const {
  const auto& policy = *timed.policy;
  reports::result row;
  row.trace = trace_.path();
  row.trace_fingerprint = trace_.fingerprint(info_.id);
  row.sequence = info_.id;
  row.layers = fmt::format("{}/{}", model_.layers.size(), model_.n_layers);
  row.policy = policy.resolved;
  row.name = policy.name;
  row.params = policy.params;
  row.precision = policy.precision_name;
  row.mode = "time";
  row.tokens.prompt = info_.n_prompt;
  row.tokens.decoded = row.tokens.scored = info_.n_decode();
  row.time.batch = options_.batch[which];
  if (!timed.failed.empty()) {
    row.status = "failed";
    row.note = timed.failed;
    return row;
  }
  const auto steps = static_cast<double>(info_.n_decode());
  row.memory.mean_entries = timed.entries / (steps * static_cast<double>(model_.layers.size()));
  row.memory.mean_bytes = timed.bytes / steps;
  const auto& samples = timed.samples[which];
  const auto step = column(samples, [](const auto& s) { return s.total(); });
  const auto attend = column(samples, [](const auto& s) { return s.attend; });
  const auto select = column(samples, [](const auto& s) { return s.select; });
  auto& time = row.time;
  time.wall_s = timed.wall_s;
  time.samples = static_cast<double>(samples.size());
  time.step_us_p50 = percentile(step, 0.5);
  time.step_us_p99 = percentile(step, 0.99);
  time.attend_us_p50 = percentile(attend, 0.5);
  time.attend_us_p99 = percentile(attend, 0.99);
  time.append_us_p50 = percentile(column(samples, [](const auto& s) { return s.append; }), 0.5);
  time.update_scores_us_p50 =
      percentile(column(samples, [](const auto& s) { return s.update_scores; }), 0.5);
  time.select_us_p50 = percentile(select, 0.5);
  time.select_us_p99 = percentile(select, 0.99);
  time.age_us_p50 = percentile(column(samples, [](const auto& s) { return s.age; }), 0.5);
  time.attend_bytes_per_s =
      percentile(column(samples, [](const auto& s) { return s.bytes / (s.attend * 1e-6); }), 0.5);
  const double bytes = mean(column(samples, [](const auto& s) { return s.bytes; }));
  // On a device all layers attend together.
  const double together =
      options_.device != nullptr ? 1.0 : static_cast<double>(model_.layers.size());
  time.copy_bytes_per_s = bandwidth(static_cast<std::int64_t>(bytes / together));
  time.memory_copy_bytes_per_s = memory_bandwidth_;
  time.short_launch_share =
      static_cast<double>(timed.short_launches) / static_cast<double>(timed.launches);
  time.compaction_us_mean = mean(select);
  if (options_.device != nullptr) {
    time.update_scores_us_p50 = time.age_us_p50 = std::nullopt;
    row.note = "on the device: attend includes update_scores, append includes age";
  }
  const auto& full = lanes_.front();
  if (!full.failed.empty()) return row;
  const auto full_step =
      column(full.samples[which], [](const step_sample& s) { return s.total(); });
  const auto full_attend =
      column(full.samples[which], [](const step_sample& s) { return s.attend; });
  time.full_step_us_p50 = percentile(full_step, 0.5);
  time.attend_saved_us_mean = mean(full_attend) - mean(attend);
  time.net_saved_us_mean = mean(full_step) - mean(step);
  time.speedup = mean(full_step) / mean(step);
  return row;
}

std::vector<reports::result> timing_run::run(std::span<const policies::policy> policies) {
  lanes_.resize(policies.size() + 1);
  lanes_[0].policy = &full_;
  for (size_t i = 0; i < policies.size(); ++i) lanes_[i + 1].policy = &policies[i];
  for (auto& lane : lanes_) start(lane);
  memory_bandwidth_ = bandwidth(memory_bytes);
  if (options_.device != nullptr) {
    time_on_device(trace_, info_.id, options_, rounds_, lanes_);
  } else {
    for (const int layer : model_.layers) run_layer(layer);
  }
  std::vector<reports::result> rows;
  for (size_t i = 1; i < lanes_.size(); ++i) {
    for (size_t b = 0; b < options_.batch.size(); ++b) rows.push_back(row_for(lanes_[i], b));
  }
  return rows;
}

}  // namespace

void check_output(const kernels::cache_shape& shape, const lane& lane, int slot,
                  const layer_data& data, std::int64_t t, const float* o) {
  const double error = error_of(shape, lane, slot, data, t, o);
  const double allowed = tolerance_for(lane.policy().precision);
  if (error <= allowed) return;
  throw std::runtime_error(fmt::format(
      "layer {}, step {}: the output differs from double-precision attention over the entries held "
      "by {:.3g} (relative), expected at most {:.3g}; not timed",
      data.layer, t, error, allowed));
}

double copy_bandwidth(std::int64_t bytes) {
  using clock = std::chrono::steady_clock;
  const auto size = static_cast<size_t>(std::max<std::int64_t>(bytes, 4096));
  const std::vector<char> from(size, 1);
  std::vector<char> to(size, 0);
  // A single copy of few bytes is shorter than the clock can tell: about a megabyte a lap.
  const auto copies = static_cast<int>(std::max<size_t>(1, (size_t{1} << 20) / size));
  double best = 0;
  for (int lap = 0; lap < 10; ++lap) {
    const auto begin = clock::now();
    for (int i = 0; i < copies; ++i) {
      std::memcpy(to.data(), from.data(), size);
      // The compiler may not drop a copy whose target is looked at.
      __asm__ volatile("" : : "r"(to.data()) : "memory");
    }
    const double seconds = std::chrono::duration<double>(clock::now() - begin).count();
    best = std::max(best, 2.0 * static_cast<double>(size) * copies / seconds);
  }
  return best;
}

std::vector<reports::result> time_policies(const traces::reader& trace, int sequence,
                                           std::span<const policies::policy> policies,
                                           const timing_options& options) {
  return timing_run(trace, sequence, options).run(policies);
}

}  // namespace kvreplay::replay
