// dbtrimkv: trimkv under one budget for all layers and heads.
// Paper: DBTrimKV, arXiv 2605.09649. Idea: retentions are comparable over heads, so let all
// entries of the model compete.
// Deviations: as in trimkv.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  read_global(params, out);
  read_trimkv(params, out);
}

}  // namespace

entry dbtrimkv_entry() {
  return {.name = "dbtrimkv",
          .kind = "policy",
          .idea =
              "trimkv+global under one name: one budget of layers * KV heads * budget entries, "
              "ranked by retention over the whole model. total= gives that number directly.",
          .source = "DBTrimKV, arXiv 2605.09649",
          .needs =
              "retention, from a gate-equipped model or kvreplay fit-retention, and every layer of "
              "the model in the trace",
          .deviations = "age_offset is 0; the released code has 2 at its eviction time.",
          .example = "dbtrimkv:budget=512,floor=16",
          .apply = apply};
}

}  // namespace kvreplay::policies
