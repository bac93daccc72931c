// adakv: a layer's budget goes to the heads whose entries are worth most.
// Paper: Ada-KV, arXiv 2407.11550. Idea: some heads attend to few positions, others to many; the
// best entries over all heads of a layer lose less than equally many of every head.
// Deviations: mode=reserve gives each head its floor first and keeps the total exact; mode=blend is
// the published rounding, whose total is not.
#include <fmt/format.h>

#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply_policy(param_reader& params, policy& out) {
  read_snapkv(params, out);
  read_adakv(params, out);
}

constexpr std::string_view deviations =
    "reserve keeps the total exact. blend, the published form, gives a head "
    "rint(count * (1 - floor) + floor(floor * F)), half to even, count being its share of the "
    "layer's best; its total is not exact.";

}  // namespace

void read_adakv(param_reader& params, policy& out) {
  start_division(out, "adakv", division_kind::adaptive);
  division_rule& rule = out.budget.division;
  if (!has_shares(out.score)) {
    throw spec_error(fmt::format(
        "adakv: needs scores >= 0 that grow with worth, which those of {} are not{}", out.name,
        out.score.kind == score_kind::retention ? "; give score=exp there" : ""));
  }
  rule.blend = params.choice("mode", {"reserve", "blend"},
                             "each head's best first, then the layer's best; or the published "
                             "rounding") == 1;
  rule.floor = params.real(
      "floor", 0.2, 0, 1, "share of F, the budget less the protected entries, that every head has");
}

entry adakv_entry() {
  return {.name = "adakv",
          .kind = "policy",
          .idea =
              "snapkv whose budget is shared by the heads of a layer: after a floor for each, the "
              "best entries of all heads stay. Heads that attend widely get more.",
          .source = "Ada-KV, arXiv 2407.11550",
          .needs = "attention of the last obs rows of the prompt",
          .deviations = deviations,
          .example = "adakv:budget=512,floor=0.2",
          .trigger = "prefill",
          .apply = apply_policy};
}

entry adakv_modifier() {
  return {.name = "adakv",
          .kind = "modifier",
          .slot = "division of the budget",
          .idea =
              "Shares a layer's budget among its heads by the base's scores, after a floor for "
              "each. Usable on every policy whose scores are >= 0 and grow with worth.",
          .source = "Ada-KV, arXiv 2407.11550",
          .needs = "nothing",
          .deviations = deviations,
          .example = "h2o:budget=512+adakv:floor=0.3",
          .apply = read_adakv};
}

}  // namespace kvreplay::policies
