#include "replay/device_lane.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "kernels/quantise.hpp"

namespace kvreplay::replay {
namespace {

constexpr std::array known_parts{"full",    "window",  "streaming", "random", "h2o",
                                 "tova",    "confkv",  "fp16",      "int8",   "every",
                                 "prefill", "protect", "pyramid"};

// The names that a resolved SPEC is made of; `+` in text is escaped there.
std::vector<std::string> parts_of(std::string_view resolved) {
  std::vector<std::string> names;
  while (!resolved.empty()) {
    const auto end = resolved.find('+');
    const auto part = resolved.substr(0, end);
    names.emplace_back(part.substr(0, part.find(':')));
    resolved = end == std::string_view::npos ? std::string_view{} : resolved.substr(end + 1);
  }
  return names;
}

kernels::device_rules device_rules_of(const lane& host) {
  const kernel_rules& r = host.rules();
  return {r.mass, r.update, r.decay, r.rank, r.recency, r.seed, r.one_set};
}

}  // namespace

std::string host_reason(const policies::policy& policy, const kernels::cache_shape& shape) {
  for (const auto& name : parts_of(policy.resolved)) {
    const bool known = std::find(known_parts.begin(), known_parts.end(), name) != known_parts.end();
    if (!known && name != "confkv-l") {
      return fmt::format("on the CPU: the device kernels have no {}", name);
    }
  }
  const std::string lacks = kernels::device_lacks(shape, storage_for(policy.precision));
  return lacks.empty() ? lacks : fmt::format("on the CPU: the device kernels have no {}", lacks);
}

device_lane::device_lane(lane& host, kernels::compute_device& device)
    : lane_(&host),
      cache_(
          device.make_cache(host.cache().shape(), host.cache().format(), device_rules_of(host))) {
  const std::string reason = host_reason(host.policy(), host.cache().shape());
  if (!reason.empty()) throw std::invalid_argument(reason);
}

std::span<kernels::head_store> device_lane::heads(int slot) {
  auto& cache = lane_->cache();
  return {&cache.head(slot, 0), static_cast<size_t>(cache.shape().kv_heads)};
}

void device_lane::forget_payload(int slot) {
  for (auto& store : heads(slot)) static_cast<kernels::payload_rows&>(store) = {};
}

void device_lane::load(int slot) {
  cache_->load(slot, heads(slot));
  forget_payload(slot);
}

void device_lane::finish(int slot, std::int64_t last_step) {
  auto& cache = lane_->cache();
  cache_->save(slot, heads(slot));
  cache.events(slot).quantised += cache_->quantised(slot);
  kernels::age(cache, slot, static_cast<std::int32_t>(last_step));
}

// Channel scales that the prompt was too short for come from all entries at the first ageing, which
// happens on the host for once. `step`: the one before which entries age.
void device_lane::calibrate(int slot, std::int64_t step) {
  auto& cache = lane_->cache();
  const auto& format = cache.format();
  if (format.body == kernels::body_format::none || format.scales != kernels::scale_format::hybrid ||
      !cache.head(slot, 0).k_channel_scale.empty() || step - 1 - format.tail_window < 0) {
    return;
  }
  cache_->save(slot, heads(slot));
  kernels::age(cache, slot, static_cast<std::int32_t>(step - 1));
  load(slot);
}

// The lane's cache takes over positions, or as many of no meaning.
void device_lane::follow(int slot, bool positions) {
  for (int h = 0; h < lane_->cache().shape().kv_heads; ++h) {
    auto& store = lane_->cache().head(slot, h);
    const auto counts = cache_->counts(slot, h);
    if (positions) {
      const auto all = cache_->positions(slot, h);
      store.body_position.assign(all.begin(), all.begin() + counts.body);
      store.tail_position.assign(all.begin() + counts.body, all.end());
    } else {
      store.body_position.resize(static_cast<size_t>(counts.body));
      store.tail_position.resize(static_cast<size_t>(counts.tail));
    }
    store.body_score.resize(store.body_position.size());
    store.tail_score.resize(store.tail_position.size());
  }
}

// Selection after a step, as on the host (replay_layer.cpp).
void device_lane::settle(std::span<const device_block> blocks, std::int64_t i) {
  const std::int64_t step = blocks[0].block.first + i;
  if (!lane_->plan().selects(step, lane_->n_prompt())) return;
  const int kv_heads = lane_->cache().shape().kv_heads;
  std::vector<int> budgets;
  budgets.reserve(blocks.size() * static_cast<size_t>(kv_heads));
  std::vector<kernels::device_selection> selections;
  for (const auto& block : blocks) {
    auto& events = block.events[static_cast<size_t>(i)];
    const size_t first = budgets.size();
    std::int64_t total = 0;
    for (int h = 0; h < kv_heads; ++h) {
      const int held = cache_->counts(block.slot, h).size();
      const int b =
          lane_->plan().budget(step, lane_->model_layer(block.slot), h, held, lane_->tight(step));
      budgets.push_back(b);
      total += b;
      events.evicted += std::max(0, held - b);
    }
    const int smallest =
        *std::min_element(budgets.begin() + static_cast<std::ptrdiff_t>(first), budgets.end());
    if (smallest != std::numeric_limits<int>::max()) events.budget = total;
    const auto protect = lane_->plan().protect(smallest);
    events.degenerate = events.evicted > 0 && protect.sinks + protect.recent > smallest;
    selections.push_back({block.slot, lane_->model_layer(block.slot), &budgets[first],
                          protect.sinks, protect.recent});
  }
  cache_->select(selections);
}

void device_lane::step(std::span<const device_block> blocks, std::int64_t i, bool positions) {
  auto& cache = lane_->cache();
  const auto& shape = cache.shape();
  const std::int64_t q_width = std::int64_t{shape.q_heads} * shape.head_dim;
  const std::int64_t k_width = std::int64_t{shape.kv_heads} * shape.head_dim;
  const std::int64_t v_width = std::int64_t{shape.kv_heads} * shape.value_dim;
  const std::int64_t o_width = std::int64_t{shape.q_heads} * shape.value_dim;
  std::vector<float> lse(blocks.size() * static_cast<size_t>(shape.q_heads));
  std::vector<kernels::device_step> items;
  for (const auto& [slot, block, events, observe, kept] : blocks) {
    const std::int64_t t = block.first + i;
    calibrate(slot, t);
    items.push_back({slot, static_cast<std::int32_t>(t), block.q + i * q_width,
                     block.k + i * k_width, block.v + i * v_width, block.o + i * o_width,
                     &lse[items.size() * static_cast<size_t>(shape.q_heads)]});
  }
  cache_->attend(items, positions);
  for (const auto& block : blocks) {
    follow(block.slot, positions);
    auto& at = block.events[static_cast<size_t>(i)];
    at = {};
    at.bytes = cache.payload_bytes(block.slot);
    at.state_bytes = cache.state_bytes(block.slot);
    for (int h = 0; h < shape.kv_heads; ++h) at.entries += cache.entries(block.slot, h);
  }
  settle(blocks, i);  // starts the selection, which runs while S(t) is observed
  // Isolated: a thread that waits here does not begin another lane's steps meanwhile.
  tbb::this_task_arena::isolate([&] {
    tbb::parallel_for(size_t{0}, blocks.size(), [&](size_t b) {
      const auto& at = blocks[b].events[static_cast<size_t>(i)];
      if (blocks[b].observe) blocks[b].observe(items[b].position, items[b].o, items[b].lse, at);
    });
  });
  for (const auto& block : blocks) {
    if (!block.kept) continue;
    const auto held = cache_->held_positions(block.slot);
    for (int h = 0; h < shape.kv_heads; ++h) {
      auto& store = cache.head(block.slot, h);
      store.body_position.clear();
      store.tail_position = held[static_cast<size_t>(h)];
    }
    block.kept(block.block.first + i);
  }
}

void device_lane::replay(std::span<const device_block> blocks, bool positions) {
  for (std::int64_t i = 0; !blocks.empty() && i < blocks[0].block.steps; ++i) {
    step(blocks, i, positions);
  }
}

}  // namespace kvreplay::replay
