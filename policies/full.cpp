// full: every entry stays. The reference that other policies are measured against.
// Paper: none. Deviations: none.
#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& /*params*/, policy& out) {
  out.budget.single = amount{amount_unit::everything, 0};
}

}  // namespace

entry full_entry() {
  return {.name = "full",
          .kind = "policy",
          .idea = "Keeps every entry. The reference for quality and memory.",
          .source = "reference",
          .needs = "nothing",
          .example = "full+int8:window=128",
          .composes = false,
          .apply = apply};
}

}  // namespace kvreplay::policies
