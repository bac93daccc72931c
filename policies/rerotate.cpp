// rerotate: positions inside the cache in place of those in the text.
// Paper: StreamingLLM, arXiv 2309.17453. Idea: rotary embeddings then never see a distance longer
// than the cache.
// Deviations: keys are stored as they were rotated and turned by the difference when they are read.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& /*params*/, policy& out) { out.rerotate = true; }

}  // namespace

entry rerotate_entry() {
  return {.name = "rerotate",
          .kind = "modifier",
          .idea =
              "Numbers the held entries of a head 0, 1, 2 ... for the rotary embedding, the newest "
              "last, in place of their positions in the text. Keys are turned by the difference.",
          .source = "StreamingLLM, arXiv 2309.17453",
          .needs = "keys that were rotated at their position, and rope_inv_freq",
          .deviations =
              "Attention over turned keys is computed in FP32 on the host, whatever the storage.",
          .example = "streaming:budget=512+rerotate",
          .apply = apply};
}

}  // namespace kvreplay::policies
