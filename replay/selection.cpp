#include "replay/selection.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "kernels/select.hpp"
#include "policies/division.hpp"
#include "replay/critical.hpp"

namespace kvreplay::replay {
namespace {

constexpr int everything = std::numeric_limits<int>::max();

// A layer as the selection sees it.
struct layer_selection {
  lane& of;
  int slot;
  std::int64_t step;
  const layer_inputs& inputs;
  int even = everything;  // the smallest even budget: what protection follows
  policies::protection protect;

  const kernels::kv_cache& cache() const { return of.cache(); }
  int heads() const { return cache().shape().kv_heads; }
  bool is_protected(std::int32_t position) const {
    return position < protect.sinks || position > step - protect.recent;
  }
};

layer_selection selection_of(lane& lane, int slot, std::int64_t step, const layer_inputs& inputs) {
  layer_selection at{lane, slot, step, inputs, everything, {}};
  for (int h = 0; h < at.heads(); ++h) {
    at.even =
        std::min(at.even, lane.plan().even_budget(step, lane.model_layer(slot),
                                                  at.cache().entries(slot, h), lane.tight(step)));
  }
  at.protect = lane.plan().protect(at.even);
  return at;
}

kernels::select_item item_for(const layer_selection& at) {
  kernels::select_item item;
  item.cache = &at.of.cache();
  item.layer = at.slot;
  item.model_layer = at.of.model_layer(at.slot);
  item.step = static_cast<std::int32_t>(at.step);
  item.sinks = at.protect.sinks;
  item.recent = at.protect.recent;
  item.rule = at.of.rules().rank;
  item.recency = at.of.rules().recency;
  item.seed = at.of.rules().seed;
  item.one_set = at.of.rules().one_set;
  return item;
}

// What a head's entries are worth, in entry order.
void worth_of(const layer_selection& at, int head, std::vector<float>& out) {
  if (host_rule* rule = at.of.rule(at.slot)) {
    rule->worth({at.cache(), at.slot, at.step, at.inputs}, head, out);
    return;
  }
  kernels::rank_scores(item_for(at), head, out);
  if (at.of.rules().rank != kernels::rank_rule::position) return;
  // Ranked by position alone, entries tie; shares of worth need numbers.
  const auto& store = at.cache().head(at.slot, head);
  for (size_t e = 0; e < out.size(); ++e) {
    out[e] = static_cast<float>((store.position(static_cast<int>(e)) + 1.0) /
                                (static_cast<double>(at.step) + 1.0));
  }
}

std::vector<policies::candidate> candidates_of(const layer_selection& at, int head,
                                               const std::vector<float>& worth) {
  const auto& store = at.cache().head(at.slot, head);
  std::vector<policies::candidate> out;
  for (int e = 0; e < store.size(); ++e) {
    const auto position = store.position(e);
    if (!at.is_protected(position)) out.push_back({worth[static_cast<size_t>(e)], position});
  }
  return out;
}

// AdaKV: the layer's budget among its heads.
std::vector<int> divided(const layer_selection& at, const std::vector<std::vector<float>>& worth,
                         const std::vector<int>& even) {
  std::vector<std::vector<policies::candidate>> candidates;
  std::vector<int> free, guarded;
  for (int h = 0; h < at.heads(); ++h) {
    candidates.push_back(candidates_of(at, h, worth[static_cast<size_t>(h)]));
    guarded.push_back(at.cache().entries(at.slot, h) - static_cast<int>(candidates.back().size()));
    free.push_back(std::max(0, even[static_cast<size_t>(h)] - guarded.back()));
  }
  auto counts = policies::adaptive_counts(at.of.policy().budget.division, candidates, free);
  for (size_t h = 0; h < counts.size(); ++h) {
    counts[h] = free[h] == 0 ? even[h] : guarded[h] + counts[h];
  }
  return counts;
}

std::vector<int> head_budgets(const layer_selection& at, step_events& events) {
  const auto& plan = at.of.plan();
  std::vector<int> out;
  std::int64_t total = 0;
  for (int h = 0; h < at.heads(); ++h) {
    const int held = at.cache().entries(at.slot, h);
    int b = 0;
    switch (at.of.policy().budget.division.kind) {
      case policies::division_kind::uniform:
      case policies::division_kind::table:
        b = plan.budget(at.step, at.of.model_layer(at.slot), h, held, at.of.tight(at.step));
        break;
      case policies::division_kind::adaptive:
        b = plan.even_budget(at.step, at.of.model_layer(at.slot), held, at.of.tight(at.step));
        break;
      case policies::division_kind::global:
        b = at.of.count(at.step, at.slot, h);
        break;
    }
    total += b;
    out.push_back(b);
  }
  if (at.even != everything) events.budget = total;
  return out;
}

bool nothing_leaves(const layer_selection& at, const std::vector<int>& budget) {
  const bool shared = at.of.policy().budget.division.kind == policies::division_kind::adaptive;
  std::int64_t held = 0, allowed = 0;
  bool fits = true;
  for (int h = 0; h < at.heads(); ++h) {
    const int n = at.cache().entries(at.slot, h);
    held += n;
    allowed += budget[static_cast<size_t>(h)];
    fits = fits && n <= budget[static_cast<size_t>(h)];
  }
  return shared ? held <= allowed : fits;
}

// The set that a file names for the step; a step without one evicts nothing.
void keep_given(const layer_selection& at, step_events& events) {
  const auto& sets = *at.of.policy().kept;
  for (int h = 0; h < at.heads(); ++h) {
    const int layer = at.of.model_layer(at.slot);
    const auto known = sets.held.find({at.step, layer, h});
    if (known == sets.held.end()) continue;
    const auto held = at.cache().positions(at.slot, h);
    for (const std::int32_t position : known->second) {
      if (std::binary_search(held.begin(), held.end(), position)) continue;
      throw std::invalid_argument(
          fmt::format("{}: step {}, layer {}, KV head {}: position {} is not held, and what is "
                      "gone cannot come "
                      "back",
                      sets.file, at.step, layer, h, position));
    }
    const auto& store = at.cache().head(at.slot, h);
    std::vector<std::uint8_t> keep;
    for (int e = 0; e < store.size(); ++e) {
      keep.push_back(
          std::binary_search(known->second.begin(), known->second.end(), store.position(e)) ? 1
                                                                                            : 0);
    }
    events.evicted += kernels::compact(at.of.cache(), at.slot, h, keep);
  }
}

// FastV, VisionZip: of the image's positions the best stay, of the others all.
void drop_images(const layer_selection& at, step_events& events) {
  const auto& rule = at.of.policy().image;
  if (at.step != at.of.n_prompt() - 1 || at.inputs.image_worth.empty()) return;
  for (int h = 0; h < at.heads(); ++h) {
    const auto& store = at.cache().head(at.slot, h);
    std::vector<std::pair<std::uint64_t, int>> image;
    for (int e = 0; e < store.size(); ++e) {
      const auto p = static_cast<size_t>(store.position(e));
      if (at.inputs.image[p] == 0) continue;
      image.emplace_back(kernels::rank_key(at.inputs.image_worth[p], store.position(e)), e);
    }
    std::sort(image.rbegin(), image.rend());
    const auto n = std::ssize(image);
    const auto stay = rule.dominant >= 0
                          ? std::min<std::ptrdiff_t>(rule.dominant, n)
                          : n - static_cast<std::ptrdiff_t>(rule.ratio * static_cast<double>(n));
    std::vector<std::uint8_t> keep(static_cast<size_t>(store.size()), 1);
    for (auto i = stay; i < n; ++i)
      keep[static_cast<size_t>(image[static_cast<size_t>(i)].second)] = 0;
    events.evicted += kernels::compact(at.of.cache(), at.slot, h, keep);
  }
}

}  // namespace

void select_entries(lane& lane, int slot, std::int64_t step, const layer_inputs& inputs,
                    step_events& events) {
  const auto& policy = lane.policy();
  const auto division = policy.budget.division.kind;
  const bool adaptive = division == policies::division_kind::adaptive;
  layer_selection at = selection_of(lane, slot, step, inputs);
  if (policy.score.kind == policies::score_kind::given) return keep_given(at, events);
  if (policy.score.kind == policies::score_kind::image) return drop_images(at, events);
  std::vector<int> budget = head_budgets(at, events);
  if (nothing_leaves(at, budget)) return;
  for (int h = 0; h < at.heads(); ++h) {
    // What is shared drops as one: then every head's part of it does.
    auto& b = budget[static_cast<size_t>(h)];
    const bool over = adaptive || lane.cache().entries(slot, h) > b;
    if (over && division != policies::division_kind::global)
      b = static_cast<int>(lane.plan().target(b));
  }
  auto item = item_for(at);
  std::vector<std::vector<float>> worth;
  if (item.rule == kernels::rank_rule::given || adaptive || policy.critical.on) {
    worth.resize(static_cast<size_t>(at.heads()));
    for (int h = 0; h < at.heads(); ++h) {
      const bool leaves = lane.cache().entries(slot, h) > budget[static_cast<size_t>(h)];
      if (adaptive || leaves) worth_of(at, h, worth[static_cast<size_t>(h)]);
    }
    if (adaptive) budget = divided(at, worth, budget);
    if (policy.critical.on)
      apply_critical(lane, slot, step, inputs, at.protect, budget, worth, events);
    item.rule = kernels::rank_rule::given;
    item.given = worth;
  }
  item.budget = budget.data();
  const auto result = kernels::select(item);
  events.evicted = static_cast<int>(result.evicted);
  // Also where what is protected has left for good since: {0, 1, 2} of four sinks, budget 3.
  events.degenerate =
      result.degenerate || (result.evicted > 0 && at.protect.sinks + at.protect.recent > at.even);
}

std::vector<int> global_counts(lane& lane, std::int64_t step,
                               std::span<const layer_inputs> inputs) {
  const int slots = lane.cache().shape().layers, heads = lane.cache().shape().kv_heads;
  std::vector<int> held, guarded;
  for (int slot = 0; slot < slots; ++slot) {
    for (int h = 0; h < heads; ++h) held.push_back(lane.cache().entries(slot, h));
  }
  std::int64_t total = lane.plan().total(step, lane.tight(step));
  if (std::accumulate(held.begin(), held.end(), std::int64_t{0}) <= total) return held;
  total = lane.plan().target(total);
  std::vector<std::vector<policies::candidate>> candidates;
  std::vector<float> worth;
  for (int slot = 0; slot < slots; ++slot) {
    const layer_selection at = selection_of(lane, slot, step, inputs[static_cast<size_t>(slot)]);
    for (int h = 0; h < heads; ++h) {
      worth_of(at, h, worth);
      candidates.push_back(candidates_of(at, h, worth));
      guarded.push_back(held[candidates.size() - 1] - static_cast<int>(candidates.back().size()));
    }
  }
  const std::int64_t left =
      total - std::accumulate(guarded.begin(), guarded.end(), std::int64_t{0});
  const auto n = static_cast<std::int64_t>(held.size());
  if (left < 0) {
    std::vector<int> even;
    for (std::int64_t i = 0; i < n; ++i) {
      even.push_back(static_cast<int>(total / n + (i < total % n ? 1 : 0)));
    }
    return even;
  }
  std::vector<int> first;
  for (const int g : guarded) {
    first.push_back(std::max(0, lane.policy().budget.division.least - g));
  }
  // Floors that do not fit are cut to an even part.
  const auto sum = std::accumulate(first.begin(), first.end(), std::int64_t{0});
  if (sum > left) std::fill(first.begin(), first.end(), static_cast<int>(left / n));
  auto counts = policies::divide(candidates, first, left);
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += guarded[i];
  return counts;
}

void decide_all_layers(lane& lane, std::int64_t step, std::span<const layer_inputs> inputs) {
  const auto& shape = lane.cache().shape();
  std::vector<int> counts(static_cast<size_t>(shape.layers * shape.kv_heads));
  if (lane.plan().selects(step, lane.n_prompt())) counts = global_counts(lane, step, inputs);
  lane.decide_counts(step, counts);
}

}  // namespace kvreplay::replay
