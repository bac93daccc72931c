#include "replay/match_bytes.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string_view>

#include "policies/params.hpp"

namespace kvreplay::replay {
namespace {

constexpr double tolerance = 0.005;
constexpr int most_rounds = 48;
constexpr std::array<std::string_view, 4> budget_keys{"budget", "high", "low", "total"};

struct setting {
  double factor = 1, bytes = 0;
  policies::policy policy;
};

// Where one policy's search stands.
struct search {
  std::optional<setting> below, above;  // mean bytes <= target, > target
  double next = 1;
  bool done = false;
  matched_policy result;
};

policies::amount scaled(const policies::amount& a, double factor, int least) {
  policies::amount out = a;
  switch (a.unit) {
    case policies::amount_unit::everything:
      break;
    case policies::amount_unit::entries:
      out.value = std::max({1.0, static_cast<double>(least), std::floor(factor * a.value + 0.5)});
      break;
    case policies::amount_unit::percent:
      out.value = factor * a.value;
      break;
    case policies::amount_unit::bytes:
      out.value = std::max(1.0, std::floor(factor * a.value));
      break;
  }
  return out;
}

// Replaces `key=old` where it stands as a whole parameter.
std::string replace_parameter(std::string spec, std::string_view key, const std::string& from,
                              const std::string& to) {
  const std::string old_text = fmt::format("{}={}", key, from);
  const std::string new_text = fmt::format("{}={}", key, to);
  for (size_t at = 0; (at = spec.find(old_text, at)) != std::string::npos; at += new_text.size()) {
    const size_t end = at + old_text.size();
    const bool whole = (at > 0 && (spec[at - 1] == ':' || spec[at - 1] == ',')) &&
                       (end == spec.size() || spec[end] == ',' || spec[end] == '+');
    if (!whole) {
      at += 1;
      continue;
    }
    spec.replace(at, old_text.size(), new_text);
  }
  return spec;
}

bool has_budget(const policies::policy& policy) {
  return policy.budget.gated || policy.budget.division.total > 0 ||
         policy.budget.single.unit != policies::amount_unit::everything;
}

void finish(search& s, const setting& taken, double target) {
  s.done = true;
  s.result.policy = taken.policy;
  s.result.factor = taken.factor;
  const double difference = (taken.bytes - target) / target;
  if (std::fabs(difference) > tolerance) {
    s.result.difference = difference;
    s.result.note = fmt::format(
        "mean bytes {:+.2f} % off the target: neighbouring budgets bracket it", 100 * difference);
  }
}

// A factor strictly between the bracket's whose budgets are neither end's; none if they are
// neighbours. `first` is tried first. No replay is needed to tell.
std::optional<double> factor_between(const search& s, const policies::policy& original,
                                     double first) {
  double low = s.below->factor, high = s.above->factor, factor = first;
  for (int i = 0; i < 60 && low < high; ++i) {
    const auto spec = scale_budgets(original, factor).resolved;
    if (spec == s.below->policy.resolved) {
      low = factor;
    } else if (spec == s.above->policy.resolved) {
      high = factor;
    } else {
      return factor;
    }
    factor = 0.5 * (low + high);
  }
  return std::nullopt;
}

// Both sides known: interpolate, and halve where interpolation creeps towards one end.
void narrow(search& s, const policies::policy& original, double target) {
  const double low = s.below->factor, high = s.above->factor, width = high - low;
  double next = low + width * (target - s.below->bytes) / (s.above->bytes - s.below->bytes);
  if (!(next > low + 0.02 * width) || !(next < high - 0.02 * width)) next = 0.5 * (low + high);
  if (const auto factor = factor_between(s, original, next)) {
    s.next = *factor;
  } else {
    finish(s, *s.below, target);
  }
}

// The next factor to try, or the end of the search, after `now` was measured.
void advance(search& s, const policies::policy& original, const setting& now, double target) {
  if (std::fabs(now.bytes - target) <= tolerance * target) return finish(s, now, target);
  const bool too_small = now.bytes < target;
  auto& side = too_small ? s.below : s.above;
  // The same bytes from larger (smaller) budgets: everything is kept, or nothing more can go.
  const bool stuck = side && side->bytes == now.bytes && side->factor != now.factor;
  side = now;
  if (s.below && s.above) return narrow(s, original, target);
  if (stuck) {
    finish(s, now, target);
    s.result.note = fmt::format("mean bytes {:+.2f} % off the target: no budget comes nearer",
                                100 * (now.bytes - target) / target);
    return;
  }
  s.next = now.factor * std::clamp(target / now.bytes, 0.25, 4.0) * (too_small ? 1.02 : 0.98);
}

}  // namespace

policies::policy scale_budgets(const policies::policy& policy, double factor) {
  std::string spec = policy.resolved;
  const int least = policy.protect.sinks + (policy.protect.heavy < 0 ? policy.protect.recent : 0);
  const policies::amount total{policies::amount_unit::entries,
                               static_cast<double>(policy.budget.division.total)};
  for (const auto key : budget_keys) {
    const policies::amount* a = nullptr;
    if (key == "budget" && !policy.budget.gated) a = &policy.budget.single;
    if (key == "high" && policy.budget.gated) a = &policy.budget.gate.high;
    if (key == "low" && policy.budget.gated) a = &policy.budget.gate.low;
    if (key == "total" && total.value > 0) a = &total;  // of global, in place of budget=
    if (a == nullptr || a->unit == policies::amount_unit::everything) continue;
    spec = replace_parameter(spec, key, policies::amount_text(*a),
                             policies::amount_text(scaled(*a, factor, least)));
  }
  auto out = policies::parse_policy(spec);
  out.spec = policy.spec;
  return out;
}

std::vector<matched_policy> match_bytes(const traces::reader& trace, int sequence,
                                        std::span<const policies::policy> policies,
                                        double target_bytes, const open_loop_options& options) {
  std::vector<search> searches(policies.size());
  for (size_t i = 0; i < policies.size(); ++i) {
    searches[i].result.policy = policies[i];
    if (has_budget(policies[i])) continue;
    searches[i].done = true;
    searches[i].result.note = "no budget to match";
  }
  open_loop_options light = options;
  light.quality = light.bound = light.per_step = light.per_head = light.kept = light.details =
      false;
  for (int round = 0; round < most_rounds; ++round) {
    std::vector<size_t> open;
    std::vector<policies::policy> batch;
    for (size_t i = 0; i < searches.size(); ++i) {
      if (searches[i].done) continue;
      open.push_back(i);
      batch.push_back(scale_budgets(policies[i], searches[i].next));
    }
    if (open.empty()) break;
    const auto rows = replay_open(trace, sequence, batch, light);
    for (size_t j = 0; j < open.size(); ++j) {
      auto& s = searches[open[j]];
      const auto& row = rows[j].row;
      if (row.status != "ok" || !row.memory.mean_bytes) {
        s.done = true;  // the full run will say what is wrong
        continue;
      }
      advance(s, policies[open[j]], {s.next, *row.memory.mean_bytes, batch[j]}, target_bytes);
    }
  }
  std::vector<matched_policy> out;
  for (auto& s : searches) {
    if (!s.done && s.below) finish(s, *s.below, target_bytes);
    out.push_back(std::move(s.result));
  }
  return out;
}

}  // namespace kvreplay::replay
