// rkv: entries that are attended to and say something new stay.
// Paper: R-KV, arXiv 2505.24133. Idea: reasoning repeats itself; near-equal keys are redundant, and
// of such a family the newest is enough.
// Deviations: importance and redundancy are taken over all held entries, the protected window
// included; a key without near-duplicates spares none (the published code then spares entry 0).
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  out.score.lambda =
      params.real("lambda", 0.1, 0, 1, "weight of importance; the rest weighs against redundancy");
  out.score.obs = params.integer("obs", 8, 1, 1 << 20,
                                 "last queries that are observed; as many newest entries stay");
  read_pool(params, out);
  out.score.kind = score_kind::redundancy;
  out.protect.recent = out.score.obs;
}

}  // namespace

entry rkv_entry() {
  return {.name = "rkv",
          .kind = "policy",
          .idea =
              "Ranks entries by lambda * importance - (1 - lambda) * redundancy. Importance is the "
              "attention of the last obs queries, with the largest logit of the group and pooled; "
              "redundancy is the softmax over entries of their keys' mean cosine to the others, "
              "the newest near-duplicate (cosine above 0.5) of each left out.",
          .source = "R-KV, arXiv 2505.24133",
          .needs = "keys and queries: q of the last obs rows of the prompt",
          .deviations =
              "Both terms are taken over all held entries, the window's included. A key without "
              "near-duplicates spares none.",
          .example = "rkv:budget=512,lambda=0.1",
          .trigger = "every:n=128",
          .apply = apply};
}

}  // namespace kvreplay::policies
