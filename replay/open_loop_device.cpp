// The lanes of a pass that run on a device: layers advance together, so that a step of all of them
// is one sequence of launches per policy. Lanes of the host have a pass of their own
// (open_loop.cpp).
#include <fmt/format.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <chrono>

#include "replay/open_loop_pass.hpp"
#include "replay/projection.hpp"

namespace kvreplay::replay {

// What all lanes share of one layer. Not to be moved: the reference points inside.
struct open_loop_pass::device_layer {
  device_layer(const open_loop_pass& pass, int cache_slot)
      : slot(cache_slot),
        layer(pass.layers_[static_cast<size_t>(slot)]),
        own(cache_shape_for(pass.model_, {&layer, 1})),
        data(load_layer(pass.trace_, pass.info_.id, layer)),
        weights(pass.parts_.projected ? output_weights(pass.projection(), pass.trace_.wo(layer))
                                      : std::vector<float>{}),
        prompt(own, data),
        reference(own, data,
                  {.rows = pass.options_.quality && pass.options_.bound,
                   .bound = pass.options_.quality && pass.options_.bound}) {}
  device_layer(const device_layer&) = delete;

  int slot, layer;
  kernels::cache_shape own;
  layer_data data;
  std::vector<float> weights;
  prompt_observations prompt;
  full_reference reference;
};

bool open_loop_pass::any_lane(bool on_device) const {
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const auto& lane) {
    return lane != nullptr && (lane->device != nullptr) == on_device;
  });
}

// As many as stay within about 4 GiB of widened rows.
int open_loop_pass::layers_at_once() const {
  const std::int64_t widths = std::int64_t{2} * model_.n_q_heads * model_.head_dim +
                              std::int64_t{2} * model_.n_kv_heads * model_.head_dim;
  const std::int64_t rows = options_.bound ? 2 * block_steps() * model_.n_q_heads : 0;
  const std::int64_t bytes = info_.n_tokens * (widths + rows) * std::int64_t{sizeof(float)};
  return static_cast<int>(std::clamp<std::int64_t>((std::int64_t{4} << 30) / bytes, 1,
                                                   static_cast<std::int64_t>(layers_.size())));
}

void open_loop_pass::run_on_device() {
  const auto layers = static_cast<int>(layers_.size());
  const int together = layers_at_once();
  for (int first = 0; first < layers; first += together) {
    device_group group(static_cast<size_t>(std::min(together, layers - first)));
    tbb::parallel_for(size_t{0}, group.size(), [&](size_t i) {
      const int slot = first + static_cast<int>(i);
      try {
        group[i] = std::make_unique<device_layer>(*this, slot);
      } catch (const std::exception& e) {
        layer_failed_[static_cast<size_t>(slot)] = e.what();
      }
    });
    if (std::any_of(group.begin(), group.end(), [](const auto& l) { return l == nullptr; }))
      continue;
    try {
      run_device_group(group);
    } catch (const std::exception& e) {
      layer_failed_[static_cast<size_t>(first)] = e.what();
    }
  }
}

// Calls work(lane) for the device's lanes that are well, in parallel.
void open_loop_pass::each_device_lane(const std::function<void(running_lane&)>& work) {
  tbb::parallel_for(size_t{0}, lanes_.size(), [&](size_t i) {
    running_lane* lane = lanes_[i].get();
    if (lane == nullptr || lane->device == nullptr) return;
    if (std::any_of(lane->failed.begin(), lane->failed.end(),
                    [](const auto& why) { return !why.empty(); })) {
      return;
    }
    try {
      work(*lane);
    } catch (const std::exception& e) {
      lane->failed[0] = fmt::format("{}: sequence {}: {}", trace_.path(), info_.id, e.what());
    }
  });
}

void open_loop_pass::run_device_group(const device_group& group) {
  for (const auto& layer : group) {
    const auto slot = static_cast<size_t>(layer->slot);
    if (parts_.residual) {
      residual_norm_[slot].assign(layer->data.residual_norm.begin() + info_.n_prompt,
                                  layer->data.residual_norm.begin() + info_.n_tokens);
    }
    reference_l1_[slot].resize(static_cast<size_t>(info_.n_decode()));
  }
  each_device_lane([&](running_lane& lane) {
    for (const auto& layer : group) {
      const auto events =
          load_prompt(lane.state, layer->slot, layer->data, layer->prompt, inputs_of(layer->data));
      lane.measures.prompt_evicted[static_cast<size_t>(layer->slot)] = events.evicted;
      lane.measures.prompt_degenerate[static_cast<size_t>(layer->slot)] = events.degenerate ? 1 : 0;
      lane.kept.note(lane.state.cache(), layer->slot, info_.n_prompt - 1);
      lane.device->load(layer->slot);
    }
  });
  report_progress(info_.n_prompt * std::ssize(group));
  const std::int64_t block = block_steps();
  for (std::int64_t first = info_.n_prompt; first < info_.n_tokens; first += block) {
    const std::int64_t steps = std::min(block, info_.n_tokens - first);
    tbb::parallel_for(size_t{0}, group.size(), [&](size_t i) {
      if (options_.quality) group[i]->reference.load(first, steps);
      if (parts_.projected) project_reference(*group[i], first, steps);
    });
    each_device_lane([&](running_lane& lane) { run_device_block(lane, group, first, steps); });
    report_progress(steps * std::ssize(group));
  }
  each_device_lane([&](running_lane& lane) {
    for (const auto& layer : group) lane.device->finish(layer->slot, info_.n_tokens - 1);
  });
}

void open_loop_pass::project_reference(const device_layer& layer, std::int64_t first,
                                       std::int64_t steps) {
  const auto rows =
      project(projection(), layer.weights,
              {layer.reference.o(first), static_cast<size_t>(steps * layer.data.o_width)}, steps);
  auto& l1 = reference_l1_[static_cast<size_t>(layer.slot)];
  for (std::int64_t i = 0; i < steps; ++i) {
    l1[static_cast<size_t>(first - info_.n_prompt + i)] = rows[static_cast<size_t>(i)].l1;
  }
}

void open_loop_pass::run_device_block(running_lane& lane, const device_group& group,
                                      std::int64_t first, std::int64_t steps) {
  using clock = std::chrono::steady_clock;
  const auto start = clock::now();
  std::vector<std::vector<float>> o;
  std::vector<std::vector<step_events>> events(
      group.size(), std::vector<step_events>(static_cast<size_t>(steps)));
  std::vector<step_observation> observations;
  for (const auto& layer : group) {
    o.emplace_back(static_cast<size_t>(steps * layer->data.o_width));
    observations.emplace_back(layer->own, layer->data, layer->reference, spans_, parts_,
                              options_.skip);
  }
  std::vector<device_block> blocks;
  for (size_t i = 0; i < group.size(); ++i) {
    const auto& data = group[i]->data;
    const int slot = group[i]->slot;
    device_block block;
    block.slot = slot;
    block.block = {first, steps, data.q_at(first), data.k_at(first), data.v_at(first), o[i].data()};
    block.events = events[i];
    if (options_.quality) {
      block.observe = [&lane, slot, &observation = observations[i]](
                          std::int64_t t, const float* out, const float* lse, const step_events&) {
        observation(lane.state, slot, t, out, lse, lane.measures);
      };
    }
    if (options_.kept) {
      block.kept = [&lane, slot](std::int64_t t) { lane.kept.note(lane.state.cache(), slot, t); };
    }
    blocks.push_back(std::move(block));
  }
  lane.device->replay(blocks, options_.quality || options_.kept);
  for (size_t i = 0; i < group.size(); ++i) {
    const int slot = group[i]->slot;
    for (std::int64_t s = 0; s < steps; ++s) {
      take_events(events[i][static_cast<size_t>(s)],
                  lane.measures.at(slot, first - info_.n_prompt + s));
    }
    if (parts_.projected) {
      project_block(lane, slot, group[i]->reference, group[i]->weights, o[i], first, steps);
    }
  }
  lane.seconds[static_cast<size_t>(group[0]->slot)] +=
      std::chrono::duration<double>(clock::now() - start).count();
}

}  // namespace kvreplay::replay
