// critical: part of a budget goes to entries whose values weigh most in the layer's output.
// Paper: CriticalKV, arXiv 2502.03805. Idea: what an entry changes is its weight times the norm of
// its projected value; once the best by weight are kept, that product bounds the output error.
// Deviations: scores are normalised over the head's entries that are not protected; the budget that
// is split is the head's less its protected entries.
#include <fmt/format.h>

#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  if (!has_shares(out.score)) {
    throw spec_error(fmt::format(
        "critical: needs scores >= 0 that grow with worth, which those of {} are not{}", out.name,
        out.score.kind == score_kind::retention ? "; give score=exp there" : ""));
  }
  out.critical.on = true;
  out.critical.first =
      params.real("first", 0.5, 0, 1, "share of the budget that goes by score alone");
  out.critical.epsilon = params.real("epsilon", 1e-4, 0, 1,
                                     "added to scores of sum 1 in stage 2; 0: the paper's form");
}

}  // namespace

entry critical_entry() {
  return {.name = "critical",
          .kind = "modifier",
          .idea =
              "Two stages: the best `first` of a head's budget by score, the rest by (score + "
              "epsilon) times the L1 norm of the value through the output projection. The norm is "
              "the mean over the query heads of the group.",
          .source = "CriticalKV, arXiv 2502.03805",
          .needs = "value_norm, or wo, from which it is computed",
          .deviations =
              "epsilon is the published code's. Scores are normalised to sum 1 over the entries "
              "that are not protected.",
          .example = "snapkv:budget=512+critical:first=0.5",
          .apply = apply};
}

}  // namespace kvreplay::policies
