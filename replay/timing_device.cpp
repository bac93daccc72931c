#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <stdexcept>

#include "replay/bind.hpp"
#include "replay/device_lane.hpp"
#include "replay/timing_parts.hpp"

namespace kvreplay::replay {
namespace {

// What all policies share of one layer. Not to be moved: the observations point inside.
struct timed_layer {
  timed_layer(const traces::reader& trace, int sequence, int layer)
      : own(cache_shape_for(trace.model(), {&layer, 1})),
        data(load_layer(trace, sequence, layer)),
        prompt(own, data) {}
  timed_layer(const timed_layer&) = delete;

  kernels::cache_shape own;
  layer_data data;
  prompt_observations prompt;
};

using timed_layers = std::vector<std::unique_ptr<timed_layer>>;

void add_lap(std::string_view kernel, double us, timed_lane& timed, step_sample& sample) {
  if (kernel == "attend" || kernel == "layer_mean") {
    sample.attend += us;
    if (kernel == "layer_mean") return;
    ++timed.launches;
    if (us < short_launch_us) ++timed.short_launches;
  } else if (kernel == "select" || kernel == "compact") {
    sample.select += us;
  } else {
    sample.append += us;  // the layers' own windows too
  }
}

// Copies of the sequence under one policy: slot c * layers + l is layer l of copy c.
class device_copies {
 public:
  device_copies(const traces::reader& trace, int sequence, const timed_lane& timed,
                const timed_layers& layers, int copies, kernels::compute_device& device)
      : first_(trace.sequence(sequence).n_prompt),
        layers_(layers),
        numbers_(numbers(trace.model().layers, copies)),
        state_(*timed.policy, dims_for(trace.model()), cache_shape_for(trace.model(), numbers_),
               numbers_, first_, timed.tight),
        on_device_(state_, device) {
    for (size_t slot = 0; slot < numbers_.size(); ++slot) {
      timed_layer& layer = *layers_[slot % layers_.size()];
      load_prompt(state_, static_cast<int>(slot), layer.data, layer.prompt, inputs_of(layer.data));
      on_device_.load(static_cast<int>(slot));
    }
    events_.resize(numbers_.size());
    o_.resize(numbers_.size() * static_cast<size_t>(layers_[0]->data.o_width));
  }

  device_lane& on_device() { return on_device_; }
  const std::vector<step_events>& events() const { return events_; }

  // Step i of the decode; `check`: against double-precision attention.
  void step(std::int64_t i, bool check) {
    std::vector<device_block> blocks;
    for (size_t slot = 0; slot < numbers_.size(); ++slot) {
      const timed_layer& layer = *layers_[slot % layers_.size()];
      const layer_data& data = layer.data;
      device_block block;
      block.slot = static_cast<int>(slot);
      block.block = {first_ + i,
                     1,
                     data.q_at(first_ + i),
                     data.k_at(first_ + i),
                     data.v_at(first_ + i),
                     &o_[slot * static_cast<size_t>(data.o_width)]};
      block.events = {&events_[slot], 1};
      if (check) {
        block.observe = [this, &layer, slot](std::int64_t t, const float* o, const float*,
                                             const step_events&) {
          check_output(layer.own, state_, static_cast<int>(slot), layer.data, t, o);
        };
      }
      blocks.push_back(std::move(block));
    }
    on_device_.replay(blocks, check);
  }

 private:
  static std::vector<int> numbers(const std::vector<int>& layers, int copies) {
    std::vector<int> all;
    for (int c = 0; c < copies; ++c) all.insert(all.end(), layers.begin(), layers.end());
    return all;
  }

  std::int64_t first_;
  const timed_layers& layers_;
  std::vector<int> numbers_;  // [slots], the model's
  lane state_;
  device_lane on_device_;
  std::vector<step_events> events_;  // [slots]
  std::vector<float> o_;             // [slots, q_heads, value_dim]
};

class device_timing {
 public:
  device_timing(const traces::reader& trace, int sequence, const timing_options& options,
                int rounds)
      : trace_(trace),
        sequence_(sequence),
        steps_(trace.sequence(sequence).n_decode()),
        options_(options),
        rounds_(rounds) {
    for (const int layer : trace.model().layers) {
      layers_.push_back(std::make_unique<timed_layer>(trace, sequence, layer));
    }
  }

  void run(timed_lane& timed) {
    const std::string reason =
        host_reason(*timed.policy, cache_shape_for(trace_.model(), trace_.model().layers));
    if (!reason.empty()) throw std::runtime_error(fmt::format("not timed {}", reason));
    check(timed);
    for (size_t which = 0; which < options_.batch.size(); ++which) {
      for (int round = 0; round < rounds_; ++round) time_round(timed, which, round);
    }
  }

 private:
  // Runs all steps once, untimed, and compares the first, the middle and the last.
  void check(timed_lane& timed) {
    device_copies one(trace_, sequence_, timed, layers_, 1, *options_.device);
    for (std::int64_t i = 0; i < steps_; ++i) {
      one.step(i, i == 0 || i == steps_ / 2 || i == steps_ - 1);
      for (const auto& events : one.events()) {
        timed.entries += static_cast<double>(events.entries) / trace_.model().n_kv_heads;
        timed.bytes += static_cast<double>(events.bytes);
      }
    }
  }

  void time_round(timed_lane& timed, size_t which, int round) {
    device_copies all(trace_, sequence_, timed, layers_, options_.batch[which], *options_.device);
    step_sample* sample = nullptr;
    all.on_device().time_kernels(
        [&](std::string_view kernel, double us) { add_lap(kernel, us, timed, *sample); });
    for (std::int64_t i = 0; i < steps_; ++i) {
      sample = &timed.samples[which][static_cast<size_t>(round * steps_ + i)];
      options_.device->flush_caches();
      all.step(i, false);
      all.on_device().synchronise();  // the step's selection belongs to it
      for (const auto& events : all.events()) sample->bytes += static_cast<double>(events.bytes);
    }
  }

  const traces::reader& trace_;
  int sequence_;
  std::int64_t steps_;
  const timing_options& options_;
  int rounds_;
  timed_layers layers_;
};

}  // namespace

void time_on_device(const traces::reader& trace, int sequence, const timing_options& options,
                    int rounds, std::span<timed_lane> lanes) {
  using clock = std::chrono::steady_clock;
  device_timing timing(trace, sequence, options, rounds);
  std::int64_t done = 0;
  for (timed_lane& timed : lanes) {
    const auto begin = clock::now();
    try {
      if (timed.failed.empty()) timing.run(timed);
    } catch (const std::exception& e) {
      timed.failed = fmt::format("{}: sequence {}: {}", trace.path(), sequence, e.what());
    }
    timed.wall_s += std::chrono::duration<double>(clock::now() - begin).count();
    if (options.progress) options.progress(++done, std::ssize(lanes));
  }
}

}  // namespace kvreplay::replay
