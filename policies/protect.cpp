// protect: sinks and a recent window for any policy, in place of its own.
// Paper: none. Deviations: none.
#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  const auto sinks = params.integer_or("sinks", "base", 0, no_upper_limit,
                                       "first positions that stay; base: as the policy says");
  const auto recent = params.integer_or("recent", "base", 0, no_upper_limit,
                                        "newest entries that stay; base: as the policy says");
  if (sinks) out.protect.sinks = *sinks;
  if (recent) {
    out.protect.recent = *recent;
    out.protect.heavy = -1;
  }
}

}  // namespace

entry protect_entry() {
  return {.name = "protect",
          .kind = "modifier",
          .idea =
              "Protects first positions and newest entries under any policy, in place of its "
              "own rule. If more is protected than the budget holds, sinks stay first, then "
              "the newest.",
          .source = "baseline",
          .needs = "nothing",
          .example = "tova:budget=512+protect:sinks=4,recent=64",
          .apply = apply};
}

}  // namespace kvreplay::policies
