// kept: sets that somebody else chose, replayed through real kernels and byte counts.
// Paper: none. Idea: any code that can write a CSV can be compared with the policies here.
// Deviations: none.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  out.kept_file = params.text("file", "CSV of the form that replay --kept writes");
  out.score.kind = score_kind::given;
}

}  // namespace

entry kept_entry() {
  return {.name = "kept",
          .kind = "policy",
          .idea =
              "Holds after every step the positions that a file names for it, layer and KV head. A "
              "step without a row evicts nothing; a position that would have to come back is an "
              "error.",
          .source = "baseline",
          .needs = "a CSV with the columns of --kept, of one policy",
          .example = "kept:file=kept.csv",
          .composes = false,
          .apply = apply};
}

}  // namespace kvreplay::policies
