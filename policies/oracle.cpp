// oracle: entries that the recorded run will attend to most stay.
// Paper: none, a reference. Idea: how well could a greedy choice do that knew the future attention?
// Greedy by sums, so neither a bound nor always the best.
// Deviations: none.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  read_mass(params, out, score_scope::head);
  out.score.kind = score_kind::future;
}

}  // namespace

entry oracle_entry() {
  return {.name = "oracle",
          .kind = "policy",
          .idea =
              "Ranks entries by the attention that they will get in the recorded run from all "
              "steps to come. A clairvoyant reference, greedy and therefore not a bound.",
          .source = "reference",
          .needs = "the future: attention of all decode steps of the recorded run",
          .example = "oracle:budget=512",
          .apply = apply};
}

}  // namespace kvreplay::policies
