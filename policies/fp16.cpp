// fp16: everything in FP16, the default precision.
// Paper: none. Deviations: none.
#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& /*params*/, policy& out) { out.precision.body = body_kind::none; }

}  // namespace

entry fp16_entry() {
  return {.name = "fp16",
          .kind = "precision",
          .slot = "precision",
          .idea = "Stores keys and values in FP16. The default.",
          .source = "reference",
          .needs = "nothing",
          .example = "h2o:budget=512+fp16",
          .apply = apply};
}

}  // namespace kvreplay::policies
