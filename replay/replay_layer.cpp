#include "replay/replay_layer.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "kernels/append.hpp"
#include "kernels/attend.hpp"
#include "kernels/quantise.hpp"
#include "kernels/select.hpp"
#include "kernels/update_scores.hpp"

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
      cache_(shape, with_tail(storage_for(policy.precision), tail)) {}

void settle(lane& lane, int slot, std::int64_t step, step_events& events) {
  auto& cache = lane.cache();
  const auto t = static_cast<std::int32_t>(step);
  stopwatch watch;
  if (lane.plan().selects(step, lane.n_prompt())) {
    const int heads = cache.shape().kv_heads;
    std::vector<int> budget(static_cast<size_t>(heads));
    int smallest = 0;
    std::int64_t total = 0;
    for (int head = 0; head < heads; ++head) {
      const int b = lane.plan().budget(step, lane.model_layer(slot), head,
                                       cache.entries(slot, head), lane.tight(step));
      budget[static_cast<size_t>(head)] = b;
      smallest = head == 0 ? b : std::min(smallest, b);
      total += b;
    }
    if (smallest != std::numeric_limits<int>::max()) events.budget = total;
    const auto protect = lane.plan().protect(smallest);
    kernels::select_item item;
    item.cache = &cache;
    item.layer = slot;
    item.model_layer = lane.model_layer(slot);
    item.step = t;
    item.budget = budget.data();
    item.sinks = protect.sinks;
    item.recent = protect.recent;
    item.rule = lane.rules().rank;
    item.recency = lane.rules().recency;
    item.seed = lane.rules().seed;
    item.one_set = lane.rules().one_set;
    const auto result = kernels::select(item);
    events.evicted = static_cast<int>(result.evicted);
    // Also where what is protected has left for good since: {0, 1, 2} of four sinks, budget 3.
    events.degenerate =
        result.degenerate || (result.evicted > 0 && protect.sinks + protect.recent > smallest);
  }
  events.us.select = watch.lap();
  kernels::age(cache, slot, t);
  events.us.age = watch.lap();
}

void fill_prompt(lane& lane, int slot, const layer_data& data, prompt_observations& prompt) {
  auto& cache = lane.cache();
  const std::int64_t n = data.n_prompt;
  const int window = cache.shape().window_of(slot);
  const std::int64_t begin = window > 0 ? std::max<std::int64_t>(0, n - window) : 0;
  for (std::int64_t t = begin; t < n; ++t) {
    const kernels::append_item item{&cache, slot, static_cast<std::int32_t>(t), data.k_at(t),
                                    data.v_at(t)};
    kernels::append({&item, 1});
  }
  if (cache.format().body != kernels::body_format::none) {
    kernels::calibrate(cache, slot, data.k.data(), data.v.data(), n);
  }
  if (lane.rules().mass != kernels::mass_layout::none) {
    seed_scores(cache, slot, prompt.scores(lane.policy().score, lane.rules().mass), n);
  }
}

step_events load_prompt(lane& lane, int slot, const layer_data& data, prompt_observations& prompt) {
  fill_prompt(lane, slot, data, prompt);
  step_events events;
  settle(lane, slot, data.n_prompt - 1, events);
  return events;
}

void replay_layer(lane& lane, int slot, const layer_block& block, std::span<step_events> events,
                  const step_observer& observe, const kept_observer& kept) {
  auto& cache = lane.cache();
  const auto& shape = cache.shape();
  const std::int64_t q_width = std::int64_t{shape.q_heads} * shape.head_dim;
  const std::int64_t k_width = std::int64_t{shape.kv_heads} * shape.head_dim;
  const std::int64_t v_width = std::int64_t{shape.kv_heads} * shape.value_dim;
  const std::int64_t o_width = std::int64_t{shape.q_heads} * shape.value_dim;
  std::vector<float> lse(static_cast<size_t>(shape.q_heads));
  std::vector<float> mass;
  for (std::int64_t i = 0; i < block.steps; ++i) {
    const std::int64_t t = block.first + i;
    step_events& at = events[static_cast<size_t>(i)];
    at = {};
    const kernels::append_item fresh{&cache, slot, static_cast<std::int32_t>(t),
                                     block.k + i * k_width, block.v + i * v_width};
    stopwatch watch;
    kernels::append({&fresh, 1});
    at.us.append = watch.lap();
    kernels::attend_item item;
    item.cache = &cache;
    item.layer = slot;
    item.q = block.q + i * q_width;
    item.o = block.o + i * o_width;
    item.lse = lse.data();
    item.layout = lane.rules().mass;
    if (item.layout != kernels::mass_layout::none) {
      item.mass_stride = cache.max_entries(slot);
      mass.resize(static_cast<size_t>(item.mass_stride * shape.kv_heads));
      item.mass = mass.data();
    }
    watch.lap();
    kernels::attend({&item, 1});
    at.us.attend = watch.lap();
    at.bytes = cache.payload_bytes(slot);
    at.state_bytes = cache.state_bytes(slot);
    for (int head = 0; head < shape.kv_heads; ++head) at.entries += cache.entries(slot, head);
    if (observe) observe(t, item.o, lse.data(), at);
    if (item.mass != nullptr) {
      const kernels::score_item update{
          &cache, slot, item.mass, item.mass_stride, lane.rules().update, lane.rules().decay};
      watch.lap();
      kernels::update_scores({&update, 1});
      at.us.update_scores = watch.lap();
    }
    if (i + 1 == block.steps && !block.settle_last) return;
    settle(lane, slot, t, at);
    if (kept) kept(t);
  }
}

}  // namespace kvreplay::replay
