// prefill: selection after the prompt only; the cache then grows without limit.
// Paper: none (SnapKV and its kin work so). Deviations: none.
#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& /*params*/, policy& out) { out.trigger.prefill_only = true; }

}  // namespace

entry prefill_entry() {
  return {.name = "prefill",
          .kind = "modifier",
          .slot = "trigger",
          .idea = "Selects once, after the prompt. The cache then grows without limit.",
          .source = "baseline",
          .needs = "nothing",
          .example = "h2o:budget=512+prefill",
          .apply = apply};
}

}  // namespace kvreplay::policies
