#include "replay/global_pass.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <deque>
#include <memory>

#include "replay/future_mass.hpp"
#include "replay/selection.hpp"

namespace kvreplay::replay {
namespace {

// One layer with what lanes read of it.
struct coupled_layer {
  kernels::cache_shape shape;  // of this layer alone
  layer_data data;
  std::unique_ptr<future_mass> future;
  layer_inputs inputs;
  std::vector<float> rows;  // of the current step, where the trace has attention alone
};

std::deque<coupled_layer> load_layers(const traces::reader& trace, int sequence,
                                      std::span<lane* const> lanes) {
  bool value_norm = false;
  std::vector<kernels::mass_layout> layouts;
  for (const lane* l : lanes) {
    const auto& policy = l->policy();
    value_norm = value_norm || policy.needs.value_norm;
    if (policy.score.kind == policies::score_kind::future) {
      layouts.push_back(layout_of(policy.score));
    }
  }
  std::deque<coupled_layer> layers;
  for (const int layer : trace.model().layers) {
    auto& at = layers.emplace_back();
    at.shape = cache_shape_for(trace.model(), {&layer, 1});
    at.data = load_layer(trace, sequence, layer, value_norm);
    at.inputs = inputs_of(at.data);
    if (layouts.empty()) continue;
    at.future = std::make_unique<future_mass>(at.shape, at.data, layouts);
    at.inputs.future = at.future.get();
  }
  return layers;
}

// Every layer of a step has attended: decide, then select everywhere.
void settle_all(lane& probe, lane& target, std::int64_t step,
                std::span<const layer_inputs> inputs) {
  const auto slots = probe.cache().shape().layers;
  decide_all_layers(probe, step, inputs);
  target.decide_counts(step, probe.counts(step));
  for (int slot = 0; slot < slots; ++slot) {
    step_events ignored;
    settle(probe, slot, step, ignored, inputs[static_cast<size_t>(slot)]);
  }
}

void load_step(coupled_layer& at, std::int64_t step) {
  if (at.future != nullptr) at.future->load(step, 1);
  if (!at.data.q.empty()) return;
  at.rows.resize(static_cast<size_t>(at.shape.q_heads * (step + 1)));
  full_rows_of(at.shape, at.data, step, 1, step + 1, at.rows.data());
}

void attend_layer(lane& probe, int slot, const coupled_layer& at, std::int64_t step) {
  std::vector<float> o(static_cast<size_t>(at.data.o_width));
  layer_block block;
  block.first = step;
  block.steps = 1;
  block.o = o.data();
  block.inputs = &at.inputs;
  if (at.data.q.empty()) {
    block.rows = at.rows.data();
    block.row_stride = step + 1;
  } else {
    block.q = at.data.q_at(step);
    block.k = at.data.k_at(step);
    block.v = at.data.v_at(step);
  }
  step_events ignored;
  attend_step(probe, slot, block, 0, ignored);
}

}  // namespace

std::vector<std::string> decide_global_lanes(const traces::reader& trace, int sequence,
                                             std::span<lane* const> lanes) {
  std::vector<std::string> failed(lanes.size());
  auto layers = load_layers(trace, sequence, lanes);
  std::vector<layer_inputs> inputs;
  for (const auto& at : layers) inputs.push_back(at.inputs);
  std::vector<lane> probes;
  for (const lane* l : lanes) probes.push_back(*l);
  const int slots = static_cast<int>(layers.size());
  // Over lanes and layers at once; a lane's first failure ends it.
  const auto each_layer = [&](const auto& work) {
    std::vector<std::string> why(lanes.size() * layers.size());
    tbb::parallel_for(size_t{0}, why.size(), [&](size_t i) {
      const size_t l = i / layers.size();
      if (!failed[l].empty()) return;
      try {
        work(probes[l], static_cast<int>(i % layers.size()));
      } catch (const std::exception& e) {
        why[i] = fmt::format("{}: sequence {}, layer {}: {}", trace.path(), sequence,
                             layers[i % layers.size()].data.layer, e.what());
      }
    });
    for (size_t i = 0; i < why.size(); ++i) {
      auto& line = failed[i / layers.size()];
      if (line.empty()) line = why[i];
    }
  };
  const auto decide = [&](std::int64_t step) {
    for (size_t l = 0; l < lanes.size(); ++l) {
      if (!failed[l].empty()) continue;
      try {
        settle_all(probes[l], *lanes[l], step, inputs);
      } catch (const std::exception& e) {
        failed[l] =
            fmt::format("{}: sequence {}, step {}: {}", trace.path(), sequence, step, e.what());
      }
    }
  };
  std::vector<std::unique_ptr<prompt_observations>> prompts;
  for (const auto& at : layers) {
    prompts.push_back(std::make_unique<prompt_observations>(at.shape, at.data));
  }
  each_layer([&](lane& probe, int slot) {
    const auto& at = layers[static_cast<size_t>(slot)];
    fill_prompt(probe, slot, at.data, *prompts[static_cast<size_t>(slot)], at.inputs);
  });
  const auto& info = trace.sequence(sequence);
  decide(info.n_prompt - 1);
  for (std::int64_t step = info.n_prompt; step < info.n_tokens; ++step) {
    tbb::parallel_for(0, slots, [&](int s) { load_step(layers[static_cast<size_t>(s)], step); });
    each_layer([&](lane& probe, int slot) {
      attend_layer(probe, slot, layers[static_cast<size_t>(slot)], step);
    });
    decide(step);
  }
  return failed;
}

}  // namespace kvreplay::replay
