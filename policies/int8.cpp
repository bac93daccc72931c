// int8: the newest W positions in FP16, older entries in INT8 for good.
// Paper: CONF-KV, arXiv 2605.24786, names INT8 per head and channel (scales=channel).
// Idea: recent entries are read most and stay exact; the rest costs half.
// Deviations: the default is hybrid, a channel scale times an FP16 scalar per token: static channel
// scales alone clip keys under rotary embeddings.
#include "policies/catalogue.hpp"

namespace kvreplay::policies {
namespace {

void apply(param_reader& params, policy& out) {
  precision_rule& rule = out.precision;
  rule.body = body_kind::int8;
  rule.window = params.integer("window", 128, 0, no_upper_limit, "newest positions kept in FP16");
  rule.sinks = params.integer("sinks", 0, 0, no_upper_limit, "first positions kept in FP16");
  rule.scales = static_cast<scale_kind>(params.choice(
      "scales", {"hybrid", "token", "channel", "group"},
      "channel scale x FP16 scalar per token; token scalar alone; channel alone; FP16 "
      "scale per channel over groups of 64 entries in order of ageing, which stay "
      "FP16 until the group is full and share its scales while any of them lives (a "
      "budget in bytes counts every entry as alone in its group)"));
  rule.channel_static = params.choice("update", {"grow", "static"},
                                      "scales=channel: a larger value requantises its channel, or "
                                      "is clipped") == 1;
  rule.margin = params.real("margin", 1.25, 0.01, 100, "update=static: factor on the scale");
  params.only_with("update", rule.scales == scale_kind::channel, "scales=channel");
  params.only_with("margin", rule.scales == scale_kind::channel && rule.channel_static,
                   "scales=channel,update=static");
}

}  // namespace

entry int8_entry() {
  return {.name = "int8",
          .kind = "precision",
          .slot = "precision",
          .idea =
              "Stores entries older than a window in INT8 and the rest in FP16. Ageing runs "
              "every step and is for good.",
          .source = "CONF-KV, arXiv 2605.24786",
          .needs = "nothing",
          .deviations = "The paper's form is scales=channel; hybrid, the default, does not clip.",
          .example = "confkv+int8:window=128,scales=channel",
          .apply = apply};
}

}  // namespace kvreplay::policies
