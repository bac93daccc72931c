// window: the newest B entries stay.
// Paper: none, a baseline. On models with rotary positions it collapses once position 0 has gone;
// `streaming` repairs that. Deviations: none.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  out.score.kind = score_kind::position;
}

}  // namespace

entry window_entry() {
  return {.name = "window",
          .kind = "policy",
          .idea =
              "Keeps the newest entries. Selection follows attention, so a step attends to one "
              "entry more than the budget, as a mask of budget + 1 positions does.",
          .source = "baseline",
          .needs = "nothing",
          .example = "window:budget=512",
          .apply = apply};
}

}  // namespace kvreplay::policies
