// fastv: image tokens that the prompt's last row hardly attends to leave in the layers above.
// Paper: FastV, arXiv 2403.06764. Idea: after the first layers, half of an image's tokens are
// enough. Deviations: the published code drops them inside the prompt pass, which changes what
// follows; a replay drops them after it.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  out.image.layer = params.integer("layer", 2, 1, no_upper_limit,
                                   "first layer that drops; ranked by the attention of the layer "
                                   "before it");
  out.image.ratio = params.real("ratio", 0.5, 0, 1, "share of the image tokens that leaves");
  out.score.kind = score_kind::image;
}

}  // namespace

entry fastv_entry() {
  return {.name = "fastv",
          .kind = "policy",
          .idea =
              "Ranks image tokens by the attention of the prompt's last row in the layer before "
              "`layer`, mean over all query heads, and drops a share of them from there on. "
              "Selects once, after the prompt; other tokens stay.",
          .source = "FastV, arXiv 2403.06764",
          .needs = "an image span, and the layer before `layer`",
          .deviations =
              "Tokens leave after the prompt pass, not inside it: what their absence would have "
              "changed in the prompt's later layers is not replayed.",
          .example = "fastv:layer=2,ratio=0.5",
          .composes = false,
          .apply = apply};
}

}  // namespace kvreplay::policies
