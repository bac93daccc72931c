// scissorhands: entries that were rarely attended to of late leave, many at once.
// Paper: Scissorhands, arXiv 2305.17118. Idea: what mattered in the recent past will matter again
// (persistence of importance); count the steps in which an entry got less than its even share.
// Deviations: a full head drops floor(drop * B) entries in one go and is then left to fill up; the
// prompt's last rows count as steps, each against the entries that it could see.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  out.score.history = params.integer("history", 400, 1, 1 << 20, "newest steps that count");
  out.budget.drop = params.real("drop", 0.5, 0, 1,
                                "share of the budget that a full head drops at once, rounded down; "
                                "one entry always stays");
  out.protect.recent = params.integer("recent", 10, 0, no_upper_limit, "newest entries that stay");
  read_mass(params, out, score_scope::head);
  out.score.kind = score_kind::history;
  out.score.prompt = prompt_seed::last_history;
}

}  // namespace

entry scissorhands_entry() {
  return {.name = "scissorhands",
          .kind = "policy",
          .idea =
              "Counts in how many of the last steps an entry got less than an even share of the "
              "attention, and drops those with the most. A full cache drops many entries at once "
              "and fills up again.",
          .source = "Scissorhands, arXiv 2305.17118",
          .needs = "attention of the last history rows of the prompt",
          .deviations =
              "A head that holds more than B is cut to B - floor(drop * B), after the prompt too. "
              "Of equal counts the newer entry stays.",
          .example = "scissorhands:budget=512,drop=0.25",
          .apply = apply};
}

}  // namespace kvreplay::policies
