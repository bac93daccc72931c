// tova: entries that the newest query attends to most stay.
// Paper: TOVA, arXiv 2401.06104. Idea: a transformer with a bounded cache is a recurrent network
// with many states; drop the state that the last token attends to least, in all heads alike.
// Deviations: none; protect_last and scope=head are additions, off by default.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  out.protect.recent =
      params.integer("protect_last", 0, 0, no_upper_limit, "newest entries that stay");
  read_mass(params, out, score_scope::layer);
  out.score.kind = score_kind::last;
  out.score.prompt = prompt_seed::last_row;
}

}  // namespace

entry tova_entry() {
  return {.name = "tova",
          .kind = "policy",
          .idea =
              "Keeps the entries that the newest query attends to most, by the mean over all "
              "query heads of the layer. One set for all KV heads of a layer, nothing protected.",
          .source = "TOVA, arXiv 2401.06104",
          .needs = "attention of the last row of the prompt",
          .example = "tova:budget=512",
          .apply = apply};
}

}  // namespace kvreplay::policies
