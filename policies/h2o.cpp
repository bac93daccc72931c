// h2o: entries with the largest sum of attention so far stay, next to the newest.
// Paper: H2O, arXiv 2306.14048. Idea: a few heavy hitters collect most of the attention, and what
// was attended to much will be again.
// Deviations: entries really leave (the published mask simulation lets them come back); one kept
// set per KV head, its mass reduced over the group; sums in FP32 (16-bit sums stop growing).
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  out.protect.heavy = params.real("heavy", 0.5, 0, 1,
                                  "share of the budget B chosen by score; the newest B - "
                                  "floor(heavy * B) entries stay besides");
  read_mass(params, out, score_scope::head);
  out.score.kind = score_kind::sum;
  out.score.prompt = prompt_seed::column_sums;
}

}  // namespace

entry h2o_entry() {
  return {.name = "h2o",
          .kind = "policy",
          .idea =
              "Keeps the entries that have collected the most attention over all queries so "
              "far, the prompt's included. Part of the budget is reserved for the newest.",
          .source = "H2O, arXiv 2306.14048",
          .needs = "attention over all rows of the prompt (q of every position, or column sums)",
          .deviations =
              "Entries really leave; the published mask simulation lets them come back. "
              "One kept set per KV head. Sums are FP32.",
          .example = "h2o:budget=20%",
          .apply = apply};
}

}  // namespace kvreplay::policies
