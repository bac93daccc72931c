// confidence: the gate of CONF-KV on any policy that ranks entries.
// Paper: CONF-KV, arXiv 2605.24786. Idea: confident steps (c >= tau) hold `high` entries, the
// others `low`. Deviations: smooth, hold and shrink are additions, off by default: read literally,
// one confident step cuts the cache to `high` and it grows back by one entry a step, so that the
// mean stays near `high` whatever tau is.
#include <fmt/format.h>

#include <cmath>

#include "policies/catalogue.hpp"
#include "policies/parts.hpp"

namespace kvreplay::policies {
namespace {

void read_weights(param_reader& params, gate_rule& gate) {
  gate.w_entropy = params.real("w_entropy", 0.4, 0, 1, "weight of 1 - normalised entropy in c");
  gate.w_margin = params.real("w_margin", 0.3, 0, 1, "weight of the sigmoid of the margin in c");
  gate.w_top = params.real("w_top", 0.3, 0, 1, "weight of the top probability in c");
  const double sum = gate.w_entropy + gate.w_margin + gate.w_top;
  if (std::abs(sum - 1) <= 1e-9) return;
  const std::string why =
      fmt::format("w_entropy + w_margin + w_top is {}, expected 1", real_text(sum));
  for (const char* key : {"w_top", "w_margin"}) {
    if (params.has(key)) params.refuse(key, why);
  }
  params.refuse("w_entropy", why);
}

void read_filters(param_reader& params, gate_rule& gate) {
  gate.smooth = params.real("smooth", 0, 0, 1, "c~(t) = smooth * c~(t-1) + (1 - smooth) * c(t)");
  gate.hold = params.integer("hold", 0, 0, no_upper_limit,
                             "steps before this one that must be confident too");
  gate.shrink = params
                    .integer_or("shrink", "all", 0, no_upper_limit,
                                "entries that may leave a step on the way from low to high")
                    .value_or(-1);
  gate.gate = static_cast<gate_signal>(
      params.choice("gate", {"signal", "shuffled", "random", "constant", "inverted"},
                    "what decides: c; c permuted over the steps; chance; floor((high + low) / 2) "
                    "always; c < tau"));
  gate.p = params.real("p", 0.5, 0, 1, "share of confident steps under gate=random");
  gate.seed = params.seed("seed", "of gate=shuffled and gate=random");
}

void apply(param_reader& params, policy& out) {
  out.budget.gated = false;
  read_gate(params, out, std::nullopt, std::nullopt);
}

}  // namespace

void read_gate(param_reader& params, policy& out, std::optional<amount> high,
               std::optional<amount> low) {
  if (out.budget.gated) {
    throw spec_error(fmt::format(
        "{}: it has a gate of its own; give tau=, high=, low= there and not with +confidence",
        out.name));
  }
  out.budget.gated = true;
  gate_rule& gate = out.budget.gate;
  gate.tau = params.real_or_quantile("tau", 0.6, 0, 2, gate.tau_is_quantile,
                                     "c >= tau is confident; qX: the X-quantile of the trace's c");
  gate.high = params.size("high", high, "entries after a confident step");
  gate.low = params.size("low", low, "entries after any other step");
  read_weights(params, gate);
  gate.temperature = params.real("temperature", 1, 0.01, 100, "divides the logits before c");
  read_filters(params, gate);
}

entry confidence_entry() {
  return {.name = "confidence",
          .kind = "modifier",
          .idea =
              "Chooses between two budgets by the model's confidence at each step. Usable on "
              "every policy that ranks entries; high and low replace budget=.",
          .source = "CONF-KV, arXiv 2605.24786",
          .needs =
              "confidence (or logits) at P-1 .. T-1, full logits where temperature is not 1; "
              "tau=qX and gate=shuffled read the future; gate=random and constant need none",
          .deviations = "smooth=, hold= and shrink= are additions, off by default.",
          .example = "random:recent=64+confidence:tau=0.6,high=256,low=768",
          .gates = true,
          .apply = apply};
}

}  // namespace kvreplay::policies
