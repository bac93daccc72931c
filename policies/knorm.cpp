// knorm: entries with small keys stay.
// Paper: "A simple and effective L2 norm-based strategy for KV cache compression", arXiv
// 2406.11430. Idea: keys of small norm draw more attention.
// Deviations: none.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_budget(params, out);
  out.score.kind = score_kind::key_norm;
}

}  // namespace

entry knorm_entry() {
  return {
      .name = "knorm",
      .kind = "policy",
      .idea = "Ranks entries by minus the Euclidean norm of their key. Needs no attention at all.",
      .source = "L2 norm strategy, arXiv 2406.11430",
      .needs = "keys",
      .example = "knorm:budget=512+protect:sinks=4,recent=32",
      .apply = apply};
}

}  // namespace kvreplay::policies
