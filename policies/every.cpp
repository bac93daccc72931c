// every: selection after every n-th step only, with up to n more entries in between.
// Paper: none (R-KV selects every 128 steps). Deviations: none.
#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  out.trigger.every = params.integer("n", 1, 1, no_upper_limit,
                                     "selection after P-1 and after step t with n | t - P + 1");
}

}  // namespace

entry every_entry() {
  return {.name = "every",
          .kind = "modifier",
          .slot = "trigger",
          .idea =
              "Selects after the prompt and then after every n-th step. In between the cache "
              "holds up to n entries more.",
          .source = "baseline",
          .needs = "nothing",
          .example = "h2o:budget=512+every:n=16",
          .apply = apply};
}

}  // namespace kvreplay::policies
