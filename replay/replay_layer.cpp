#include "replay/replay_layer.hpp"

#include <fmt/format.h>

#include <chrono>
#include <stdexcept>
#include <utility>

#include "kernels/append.hpp"
#include "kernels/attend.hpp"
#include "kernels/quantise.hpp"
#include "kernels/rerotate.hpp"
#include "kernels/update_scores.hpp"
#include "replay/attend_recorded.hpp"
#include "replay/selection.hpp"

namespace kvreplay::replay {
namespace {

// Microseconds since the last lap, or since it was made.
class stopwatch {
 public:
  float lap() {
    const auto now = clock::now();
    const float us = std::chrono::duration<float, std::micro>(now - last_).count();
    last_ = now;
    return us;
  }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point last_ = clock::now();
};

kernels::storage_format with_tail(kernels::storage_format format, kernels::tail_format tail) {
  format.tail = tail;
  return format;
}

void seed_scores(kernels::kv_cache& cache, int slot, const std::vector<float>& scores,
                 std::int64_t n_prompt) {
  if (scores.empty()) return;
  for (int head = 0; head < cache.shape().kv_heads; ++head) {
    auto& store = cache.head(slot, head);
    const float* row = &scores[static_cast<size_t>(head * n_prompt)];
    for (int e = 0; e < store.size(); ++e) store.set_score(e, row[store.position(e)]);
  }
}

// Rows of a block; zeros where a trace has attention alone (bytes count as if they were there).
void append_row(kernels::kv_cache& cache, int slot, std::int64_t t, const float* k,
                const float* v) {
  const auto& shape = cache.shape();
  const std::vector<float> zeros(
      k == nullptr ? static_cast<size_t>(shape.kv_heads) *
                         static_cast<size_t>(std::max(shape.head_dim, shape.value_dim))
                   : 0);
  const kernels::append_item fresh{&cache, slot, static_cast<std::int32_t>(t),
                                   k == nullptr ? zeros.data() : k,
                                   v == nullptr ? zeros.data() : v};
  kernels::append({&fresh, 1});
}

void attend(const lane& lane, const layer_inputs& inputs, kernels::attend_item& item) {
  if (!lane.policy().rerotate || !kernels::has_gaps(*item.cache, item.layer)) {
    kernels::attend({&item, 1});
    return;
  }
  const auto turned = kernels::rerotated(*item.cache, item.layer, inputs.rope_inv_freq);
  item.cache = &turned;
  item.layer = 0;
  kernels::attend({&item, 1});
}

}  // namespace

lane::lane(const policies::policy& policy, const policies::model_dims& dims,
           const kernels::cache_shape& shape, std::vector<int> layers, std::int64_t n_prompt,
           std::vector<std::uint8_t> tight, kernels::tail_format tail)
    : policy_(policy),
      plan_(policy, dims),
      rules_(rules_for(policy.score)),
      layers_(std::move(layers)),
      n_prompt_(n_prompt),
      tight_(std::move(tight)),
      cache_(shape, with_tail(storage_for(policy.precision), tail)) {
  for (int slot = 0; slot < shape.layers; ++slot) {
    host_rules_.emplace_back(make_host_rule(policy, shape));
  }
}

void lane::decide_counts(std::int64_t step, std::span<const int> counts) {
  const auto width = static_cast<size_t>(cache_.shape().layers * cache_.shape().kv_heads);
  const auto at = static_cast<size_t>(step - (n_prompt_ - 1)) * width;
  if (counts.size() != width || at > counts_.size()) {
    throw std::logic_error(
        fmt::format("lane: {} counts for step {}, {} known", counts.size(), step, counts_.size()));
  }
  counts_.resize(std::max(counts_.size(), at + width));
  std::copy(counts.begin(), counts.end(), counts_.begin() + static_cast<std::ptrdiff_t>(at));
}

std::span<const int> lane::counts(std::int64_t step) const {
  const auto width = static_cast<size_t>(cache_.shape().layers * cache_.shape().kv_heads);
  const auto at = static_cast<size_t>(step - (n_prompt_ - 1)) * width;
  if (step < n_prompt_ - 1 || at + width > counts_.size()) {
    throw std::logic_error(
        fmt::format("lane: step {} of a budget over all layers is not decided", step));
  }
  return std::span(counts_).subspan(at, width);
}

void settle(lane& lane, int slot, std::int64_t step, step_events& events,
            const layer_inputs& inputs) {
  stopwatch watch;
  if (lane.plan().selects(step, lane.n_prompt())) {
    select_entries(lane, slot, step, inputs, events);
  }
  events.us.select = watch.lap();
  kernels::age(lane.cache(), slot, static_cast<std::int32_t>(step));
  events.us.age = watch.lap();
}

void fill_prompt(lane& lane, int slot, const layer_data& data, prompt_observations& prompt,
                 const layer_inputs& inputs) {
  auto& cache = lane.cache();
  const std::int64_t n = data.n_prompt;
  const int window = cache.shape().window_of(slot);
  const bool whole = !data.k.empty();
  const std::int64_t begin = window > 0 ? std::max<std::int64_t>(0, n - window) : 0;
  for (std::int64_t t = begin; t < n; ++t) {
    append_row(cache, slot, t, whole ? data.k_at(t) : nullptr, whole ? data.v_at(t) : nullptr);
  }
  if (whole && cache.format().body != kernels::body_format::none) {
    kernels::calibrate(cache, slot, data.k.data(), data.v.data(), n);
  }
  if (host_rule* rule = lane.rule(slot)) {
    rule->see_prompt({cache, slot, n - 1, inputs}, data, prompt);
  } else if (lane.rules().mass != kernels::mass_layout::none) {
    seed_scores(cache, slot, prompt.scores(lane.policy().score, lane.rules().mass), n);
  }
}

step_events load_prompt(lane& lane, int slot, const layer_data& data, prompt_observations& prompt,
                        const layer_inputs& inputs) {
  fill_prompt(lane, slot, data, prompt, inputs);
  step_events events;
  settle(lane, slot, data.n_prompt - 1, events, inputs);
  return events;
}

void attend_step(lane& lane, int slot, const layer_block& block, std::int64_t i, step_events& at,
                 const step_observer& observe) {
  auto& cache = lane.cache();
  const auto& shape = cache.shape();
  const std::int64_t q_width = std::int64_t{shape.q_heads} * shape.head_dim;
  const std::int64_t k_width = std::int64_t{shape.kv_heads} * shape.head_dim;
  const std::int64_t v_width = std::int64_t{shape.kv_heads} * shape.value_dim;
  const std::int64_t o_width = std::int64_t{shape.q_heads} * shape.value_dim;
  const layer_inputs none;
  const layer_inputs& inputs = block.inputs == nullptr ? none : *block.inputs;
  const std::int64_t t = block.first + i;
  const bool recorded = block.q == nullptr;
  stopwatch watch;
  append_row(cache, slot, t, recorded ? nullptr : block.k + i * k_width,
             recorded ? nullptr : block.v + i * v_width);
  at.us.append = watch.lap();
  std::vector<float> lse(static_cast<size_t>(shape.q_heads)), mass;
  kernels::attend_item item;
  item.cache = &cache;
  item.layer = slot;
  item.layout = lane.step_mass();
  item.mass_stride = cache.max_entries(slot);
  if (item.layout != kernels::mass_layout::none) {
    mass.resize(static_cast<size_t>(item.mass_stride * shape.kv_heads));
    item.mass = mass.data();
  }
  watch.lap();
  if (recorded) {
    if (item.mass != nullptr) {
      attend_recorded(cache, slot, block.rows + i * shape.q_heads * block.row_stride,
                      block.row_stride, item.layout, mass.data(), item.mass_stride);
    }
  } else {
    item.q = block.q + i * q_width;
    item.o = block.o + i * o_width;
    item.lse = lse.data();
    attend(lane, inputs, item);
  }
  at.us.attend = watch.lap();
  at.bytes = cache.payload_bytes(slot);
  at.state_bytes = cache.state_bytes(slot);
  for (int head = 0; head < shape.kv_heads; ++head) at.entries += cache.entries(slot, head);
  host_rule* rule = lane.rule(slot);
  if (rule != nullptr) at.state_bytes += rule->state_bytes();
  if (observe) observe(t, item.o, recorded ? nullptr : lse.data(), at);
  watch.lap();
  if (rule != nullptr) {
    rule->see_step({cache, slot, t, inputs}, {item.mass, item.mass_stride, item.q});
  } else if (item.mass != nullptr) {
    const kernels::score_item update{
        &cache, slot, item.mass, item.mass_stride, lane.rules().update, lane.rules().decay};
    kernels::update_scores({&update, 1});
  }
  at.us.update_scores = watch.lap();
}

void replay_layer(lane& lane, int slot, const layer_block& block, std::span<step_events> events,
                  const step_observer& observe, const kept_observer& kept) {
  const layer_inputs none;
  for (std::int64_t i = 0; i < block.steps; ++i) {
    step_events& at = events[static_cast<size_t>(i)];
    at = {};
    attend_step(lane, slot, block, i, at, observe);
    if (i + 1 == block.steps && !block.settle_last) return;
    settle(lane, slot, block.first + i, at, block.inputs == nullptr ? none : *block.inputs);
    if (kept) kept(block.first + i);
  }
}

}  // namespace kvreplay::replay
