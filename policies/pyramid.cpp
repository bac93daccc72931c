// pyramid: the budget falls linearly from the first layer to the last.
// Paper: PyramidKV, arXiv 2406.02069. Idea: attention narrows with depth, so deep layers need fewer
// entries. Deviations: shares are whole numbers whose sum is exact; exact=0 gives the published
// floor-step progression, which spends more than the budget (without its clamp to short prompts).
#include <fmt/format.h>

#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  if (out.budget.pyramid.on) {
    throw spec_error(
        fmt::format("pyramid: {} has a pyramid already; give beta=, total= there", out.name));
  }
  read_pyramid(params, out, 2);
}

}  // namespace

void read_pyramid(param_reader& params, policy& out, double beta) {
  pyramid_rule& rule = out.budget.pyramid;
  rule.on = true;
  rule.beta =
      params.real("beta", beta, 1, 1e6, "the first layer gets (2 - 1/beta) B, the last B / beta");
  rule.total = params.real("total", 1, 1e-6, 1e3, "the shares' sum is round(total * layers * B)");
  rule.exact = params.integer("exact", 1, 0, 1, "0: PyramidKV's published progression") == 1;
}

entry pyramid_entry() {
  return {.name = "pyramid",
          .kind = "modifier",
          .idea =
              "Gives early layers more entries and deep layers fewer, at the same total. No "
              "layer falls below the base's sinks + recent.",
          .source = "PyramidKV, arXiv 2406.02069",
          .needs = "nothing",
          .deviations =
              "The sum of the shares is exact; exact=0 gives the published progression "
              "with its overspend, without its clamp to short prompts.",
          .example = "h2o:budget=512+pyramid:beta=2",
          .apply = apply};
}

}  // namespace kvreplay::policies
