// int4: the newest W positions in FP16, older entries in 4 bits, as KIVI stores them.
// Paper: KIVI, arXiv 2402.02750, section 3: keys per channel, values per token, both asymmetric.
// Idea: outliers of keys live in few channels, those of values in few tokens.
// Deviations: 4 bits only; K and V of an entry age together, so values wait for the keys' group;
// codes go by the FP16 scale and zero point that are stored, scales rounded up so that none clips.
#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  precision_rule& rule = out.precision;
  rule.body = body_kind::int4;
  rule.scales = scale_kind::group;
  rule.window = params.integer("window", 128, 0, no_upper_limit, "newest positions kept in FP16");
  rule.sinks = params.integer("sinks", 0, 0, no_upper_limit, "first positions kept in FP16");
}

}  // namespace

entry int4_entry() {
  return {
      .name = "int4",
      .kind = "precision",
      .slot = "precision",
      .idea =
          "Stores entries older than a window in 4 bits: keys by channel over groups of 32 "
          "entries in order of ageing, values by entry over groups of 32 channels, each with an "
          "FP16 scale and zero point. Entries stay FP16 until their group is full; a group's "
          "scales count while any member lives. A budget in bytes counts every entry as alone "
          "in its group, the most that it can take.",
      .source = "KIVI, arXiv 2402.02750",
      .needs = "nothing",
      .deviations = "K and V age together, so values wait for the keys' group of 32.",
      .example = "h2o:budget=512+int4:window=128",
      .apply = apply};
}

}  // namespace kvreplay::policies
