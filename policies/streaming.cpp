// streaming: the first `sinks` positions and the newest entries stay.
// Paper: StreamingLLM, arXiv 2309.17453. Idea: the first positions collect the attention that has
// nowhere else to go; with them kept, a sliding window keeps working.
// Deviations: keys keep their true positions, where the published code renumbers them in the cache.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  out.protect.sinks = params.integer("sinks", 4, 0, no_upper_limit, "first positions that stay");
  out.score.kind = score_kind::position;
}

}  // namespace

entry streaming_entry() {
  return {.name = "streaming",
          .kind = "policy",
          .idea =
              "Keeps the first positions, which collect attention that has nowhere else to go, "
              "and the newest entries. The budget counts both.",
          .source = "StreamingLLM, arXiv 2309.17453",
          .needs = "nothing",
          .deviations =
              "Keys keep their true positions; the published code renumbers them inside "
              "the cache.",
          .example = "streaming:budget=512,sinks=4",
          .apply = apply};
}

}  // namespace kvreplay::policies
