// confkv: a confident model holds a small cache, an unsure one a large cache.
// Paper: CONF-KV, arXiv 2605.24786. Idea: the confidence c of the next-token distribution chooses
// between two budgets; entries rank by a moving average of their attention plus recency; a window
// of the newest is never evicted.
// Deviations: the paper gives no value for tau, budgets, window, decay or recency: all defaults are
// ours. The average is taken on a logarithmic scale (mass=log), because divided by the largest, a
// sink's, every other entry lies near 0 and recency alone ranks; mass=max gives the linear form.
#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {

void read_confkv(param_reader& params, policy& out) {
  read_gate(params, out, amount{amount_unit::entries, 256}, amount{amount_unit::entries, 768});
  out.protect.recent = params.integer("recent", 64, 0, no_upper_limit,
                                      "newest entries that are never evicted; at most high");
  out.protect.sinks = params.integer("sinks", 0, 0, no_upper_limit, "first positions that stay");
  out.score.decay = params.real("decay", 0.97, 0, 1, "of the moving average of attention");
  out.score.recency = params.real("recency", 0.05, 0, 1, "weight of (position + 1) / (t + 1)");
  out.score.mass = static_cast<mass_scale>(
      params.choice("mass", {"log", "max"},
                    "scale of the average e: 1 + ln(max(e, 1e-9)) / ln(1e9), or e / max"));
  out.score.obs = params.integer("obs", 32, 1, no_upper_limit,
                                 "last prompt rows whose mean starts the average");
  read_mass(params, out, score_scope::head);
  out.score.kind = score_kind::ema;
  out.score.prompt = prompt_seed::mean_of_last;
  out.protect.hard_recent = true;
}

entry confkv_entry() {
  return {.name = "confkv",
          .kind = "policy",
          .idea =
              "Holds few entries while the model is confident and more while it is not. "
              "Entries rank by a moving average of their attention plus recency.",
          .source = "CONF-KV, arXiv 2605.24786",
          .needs =
              "confidence (or logits) at P-1 .. T-1, full logits where temperature is not 1, "
              "attention of the last obs rows of the prompt; tau=qX and gate=shuffled read "
              "the future",
          .deviations =
              "The paper states no value for any parameter: the defaults are ours. "
              "mass=max is the linear scale, mass=log the better one. Read literally, "
              "the gate shrinks at once and grows by one entry a step; shrink=, hold= "
              "and smooth= are additions, off by default.",
          .example = "confkv:tau=0.6,high=256,low=768,shrink=2",
          .apply = read_confkv};
}

}  // namespace kvreplay::policies
