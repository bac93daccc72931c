// confkv-l: confkv with smaller budgets in deeper layers.
// Paper: CONF-KV-L in arXiv 2605.24786. Idea: deeper layers need fewer entries.
// Deviations: the paper does not give the shape of its pyramid; this is `pyramid` with beta 2.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_confkv(params, out);
  read_pyramid(params, out, 2);
}

}  // namespace

entry confkv_l_entry() {
  return {.name = "confkv-l",
          .kind = "policy",
          .idea =
              "confkv+pyramid under one name. Both budgets become shares that fall from layer "
              "to layer.",
          .source = "CONF-KV-L, arXiv 2605.24786",
          .needs = "what confkv needs",
          .deviations = "The paper does not give the shape of its pyramid.",
          .example = "confkv-l:high=256,low=768,beta=3",
          .apply = apply};
}

}  // namespace kvreplay::policies
