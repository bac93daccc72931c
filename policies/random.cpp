// random: entries stay by a hash of (seed, layer, head, position).
// Paper: none, an ablation: what a ranking is worth at the same number of entries. The hash makes
// the outcome independent of order and threads, and a larger budget keep a superset.
// Deviations: none.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  out.protect.recent = params.integer("recent", 0, 0, no_upper_limit, "newest entries that stay");
  out.protect.sinks = params.integer("sinks", 0, 0, no_upper_limit, "first positions that stay");
  out.score.seed = params.seed("seed", "of the hash");
  out.score.kind = score_kind::hash;
}

}  // namespace

entry random_entry() {
  return {.name = "random",
          .kind = "policy",
          .idea =
              "Ranks entries by a hash of seed, layer, head and position. An ablation: what is "
              "left of a policy when its ranking is taken away.",
          .source = "ablation",
          .needs = "nothing",
          .example = "random:budget=512,recent=64,seed=1",
          .apply = apply};
}

}  // namespace kvreplay::policies
