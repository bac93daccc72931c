#include "policies/parts.hpp"

namespace kvreplay::policies {

void read_budget(param_reader& params, policy& out) {
  if (out.budget.gated) {
    if (params.has("budget")) {
      params.refuse("budget", "confidence:high=,low= replaces it; give one of the two");
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

}  // namespace kvreplay::policies
