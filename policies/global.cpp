// global: one budget over all layers and heads.
// Paper: DBTrimKV, arXiv 2605.09649, has it over TrimKV scores. Idea: let the entries of all heads
// compete, so that heads which need few leave room for others.
// Deviations: none; any base may be ranked so.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {

void read_global(param_reader& params, policy& out) {
  start_division(out, "global", division_kind::global);
  division_rule& rule = out.budget.division;
  rule.total = params
                   .integer_or("total", "budget", 1, no_upper_limit,
                               "entries over all layers and KV heads; budget: layers * KV heads * "
                               "budget")
                   .value_or(0);
  rule.least = params.integer("floor", 0, 0, no_upper_limit, "entries that every head has first");
}

entry global_entry() {
  return {.name = "global",
          .kind = "modifier",
          .slot = "division of the budget",
          .idea =
              "One budget over all layers and KV heads: the best entries stay, wherever they are. "
              "Ranked by the base's scores; ties go to the newer position, the lower layer, the "
              "lower head.",
          .source = "DBTrimKV, arXiv 2605.09649",
          .needs =
              "every layer of the model in the trace, and memory for q, k and v of all of them at "
              "once (4 bytes a value)",
          .example = "h2o:budget=512+global:floor=16",
          .apply = read_global};
}

}  // namespace kvreplay::policies
