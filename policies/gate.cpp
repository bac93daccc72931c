#include "policies/gate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "policies/random_bits.hpp"

namespace kvreplay::policies {
namespace {

// Streams of the seed, so that two uses of one seed share no numbers.
constexpr std::uint64_t decision_stream = 1;
constexpr std::uint64_t permutation_stream = 2;

bool reads_confidence(const gate_rule& rule) {
  return rule.gate != gate_signal::random && rule.gate != gate_signal::constant;
}

}  // namespace

gate_state::gate_state(const gate_rule& rule, double tau) : rule_(rule), tau_(tau) {}

bool gate_state::advance(std::int64_t step, double c) {
  if (started_ && step != last_step_ + 1) {
    throw std::invalid_argument(
        fmt::format("gate: step {} after step {}, expected every step in order", step, last_step_));
  }
  const bool first = !std::exchange(started_, true);
  last_step_ = step;
  if (rule_.gate == gate_signal::constant) return false;
  if (rule_.gate == gate_signal::random) {
    // The decision itself is drawn, so that its rate is p whatever smooth and hold are.
    const auto counter = static_cast<std::uint64_t>(step);
    return unit_interval(random_bits(rule_.seed, decision_stream, counter)) < rule_.p;
  }
  if (std::isnan(c))
    throw std::domain_error(fmt::format("gate: confidence of step {} is NaN", step));
  smoothed_ = first ? c : rule_.smooth * smoothed_ + (1 - rule_.smooth) * c;
  const bool tight_side =
      rule_.gate == gate_signal::inverted ? smoothed_ < tau_ : smoothed_ >= tau_;
  // Steps before the first are on the loose side: run_ starts at 0 (inverted included, whose tight
  // side is below tau).
  run_ = tight_side ? run_ + 1 : 0;
  return run_ > rule_.hold;
}

double resolve_tau(const gate_rule& rule, std::span<const double> c) {
  if (!rule.tau_is_quantile || !reads_confidence(rule)) return rule.tau;
  if (c.empty()) throw std::invalid_argument("gate: a quantile of no confidence values");
  std::vector<double> sorted(c.begin(), c.end());
  if (std::any_of(sorted.begin(), sorted.end(), [](double x) { return std::isnan(x); })) {
    throw std::domain_error("gate: a quantile over confidence values with NaN");
  }
  std::sort(sorted.begin(), sorted.end());
  // Nearest rank, ceil(q n). 0.07 * 100 is a little above 7 in binary and means 7.
  const double rank = std::ceil(rule.tau * static_cast<double>(sorted.size()) - 1e-9);
  return sorted[static_cast<size_t>(std::max(rank, 1.0)) - 1];
}

std::vector<double> gate_input(const gate_rule& rule, std::span<const double> c) {
  std::vector<double> out(c.begin(), c.end());
  if (rule.gate != gate_signal::shuffled) return out;
  // Fisher-Yates. The modulo's bias is below n / 2^64.
  for (size_t left = out.size(); left > 1; --left) {
    std::swap(out[left - 1], out[random_bits(rule.seed, permutation_stream, left) % left]);
  }
  return out;
}

std::vector<std::uint8_t> gate_decisions(const gate_rule& rule, std::int64_t n_prompt,
                                         std::span<const double> c) {
  const std::vector<double> seen = gate_input(rule, c);
  gate_state state(rule, resolve_tau(rule, c));
  std::vector<std::uint8_t> out;
  out.reserve(seen.size());
  for (const double value : seen) {
    const std::int64_t step = n_prompt - 1 + static_cast<std::int64_t>(out.size());
    out.push_back(state.advance(step, value) ? 1 : 0);
  }
  return out;
}

}  // namespace kvreplay::policies
