#include "policies/parts.hpp"

#include <fmt/format.h>

namespace kvreplay::policies {

void read_budget(param_reader& params, policy& out) {
  if (out.budget.gated) {
    if (params.has("budget")) {
      params.refuse("budget", "confidence:high=,low= replaces it; give one of the two");
    }
    return;
  }
  if (out.budget.division.total > 0) {
    if (params.has("budget")) {
      params.refuse("budget", "global:total= replaces it; give one of the two");
    }
    return;
  }
  out.budget.single = params.size(
      "budget", std::nullopt, "entries per (layer, KV head) after selection, protected included");
}

void read_mass(param_reader& params, policy& out, score_scope scope) {
  const std::vector<std::string_view> reductions{"mean", "max", "sum"};
  out.score.gqa = static_cast<group_reduce>(
      params.choice("gqa", reductions, "how the query heads of a KV head share its mass"));
  out.score.scope = static_cast<score_scope>(
      params.choice("scope", {"head", "layer"},
                    "one kept set per KV head, or one per layer from the mean over query heads",
                    static_cast<int>(scope)));
  if (out.score.scope == score_scope::layer && out.score.gqa != group_reduce::mean) {
    params.refuse("gqa",
                  "scope=layer is the mean over all query heads; max and sum need scope=head");
  }
}

void start_division(policy& out, std::string_view name, division_kind kind) {
  if (out.budget.division.kind != division_kind::uniform) {
    throw spec_error(
        fmt::format("{}: {} divides its budget over the heads already", name, out.name));
  }
  if (out.score.scope == score_scope::layer) {
    throw spec_error(fmt::format(
        "{}: {} keeps one set for all heads of a layer (scope=layer); a budget per head needs "
        "scope=head",
        name, out.name));
  }
  if (kind != division_kind::adaptive && out.budget.pyramid.on) {
    throw spec_error(fmt::format("{}: {} has a pyramid, and {} divides over the layers itself",
                                 name, out.name, name));
  }
  out.budget.division.kind = kind;
}

void read_pool(param_reader& params, policy& out) {
  out.score.kernel =
      params.integer("kernel", 7, 1, 1023, "width of the pool over entries in position order, odd");
  if (out.score.kernel % 2 == 0) params.refuse("kernel", "expected an odd number");
  out.score.pool = static_cast<pool_kind>(
      params.choice("pool", {"max", "avg"}, "beyond the ends max sees nothing, avg counts zeros"));
}

}  // namespace kvreplay::policies
