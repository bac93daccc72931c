// keydiff: entries whose keys differ most from the others stay.
// Paper: KeyDiff, arXiv 2504.15364. Idea: keys far from the mean direction are the distinctive
// ones, and distinctive keys get attention.
// Deviations: the mean is of the keys themselves; a published variant averages unit keys.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  out.score.kind = score_kind::key_difference;
}

}  // namespace

entry keydiff_entry() {
  return {.name = "keydiff",
          .kind = "policy",
          .idea =
              "Ranks entries by minus the cosine between their key and the mean key that the head "
              "holds. Needs no attention at all.",
          .source = "KeyDiff, arXiv 2504.15364",
          .needs = "keys",
          .deviations = "The mean is of the keys themselves, not of unit keys.",
          .example = "keydiff:budget=512+protect:sinks=4,recent=32",
          .apply = apply};
}

}  // namespace kvreplay::policies
