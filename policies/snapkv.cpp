// snapkv: what the last queries of the prompt attended to stays, with its neighbourhood.
// Paper: SnapKV, arXiv 2404.14469. Idea: an observation window at the prompt's end tells which
// positions the answer will need; pooling keeps their surroundings.
// Deviations: one kept set per KV head; scores are pooled over all held entries in position order,
// the window's own included (the published code pools what lies before the window); with +every the
// window moves along with the decode queries.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {

void read_snapkv(param_reader& params, policy& out) {
  read_budget(params, out);
  out.score.obs = params.integer("obs", 32, 1, 1 << 20,
                                 "last queries that are observed; as many newest entries stay");
  read_pool(params, out);
  read_mass(params, out, score_scope::head);
  out.score.kind = score_kind::observed;
  out.score.prompt = prompt_seed::mean_of_last;
  out.protect.recent = out.score.obs;
}

entry snapkv_entry() {
  return {.name = "snapkv",
          .kind = "policy",
          .idea =
              "Ranks entries by the attention that the last obs queries of the prompt gave them, "
              "pooled over neighbours. Selects once, after the prompt, and keeps the observation "
              "window as a part of the budget.",
          .source = "SnapKV, arXiv 2404.14469",
          .needs = "attention of the last obs rows of the prompt",
          .deviations =
              "One kept set per KV head. The pool runs over all held entries, the window's "
              "included. With +every:n=k the last obs queries are observed anew, the prompt's "
              "among them until obs steps have passed.",
          .example = "snapkv:budget=512,obs=32,kernel=7",
          .trigger = "prefill",
          .apply = read_snapkv};
}

}  // namespace kvreplay::policies
