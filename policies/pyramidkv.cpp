// pyramidkv: snapkv with budgets that fall from layer to layer.
// Paper: PyramidKV, arXiv 2406.02069. Idea: attention is broad in early layers and narrow in deep
// ones; give each layer what it needs of one total.
// Deviations: shares are whole numbers whose sum is exact; exact=0 gives the published floor-step
// progression, which spends more than the budget (without its clamp to short prompts).
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_snapkv(params, out);
  read_pyramid(params, out, 20);
  out.budget.pyramid.window = out.score.obs;
}

}  // namespace

entry pyramidkv_entry() {
  return {.name = "pyramidkv",
          .kind = "policy",
          .idea =
              "snapkv with a pyramid over the layers: the observation window is set aside, the "
              "rest of the budget falls linearly with depth. The window is added back to every "
              "layer.",
          .source = "PyramidKV, arXiv 2406.02069",
          .needs = "attention of the last obs rows of the prompt",
          .deviations =
              "The sum of the shares is exact; exact=0 gives the published progression with its "
              "overspend, without its clamp to short prompts. As in snapkv otherwise.",
          .example = "pyramidkv:budget=512,beta=20",
          .trigger = "prefill",
          .apply = apply};
}

}  // namespace kvreplay::policies
