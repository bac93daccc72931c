#include "policies/gate.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace kvreplay::policies {
namespace {

using decisions = std::vector<std::uint8_t>;

gate_rule rule_with(double tau) {
  gate_rule rule;
  rule.tau = tau;
  return rule;
}

std::vector<double> ramp(int n) {
  std::vector<double> c;
  for (int i = 0; i < n; ++i) c.push_back(0.15 + 0.85 * i / (n - 1));
  return c;
}

TEST_CASE("literal: c >= tau is tight, equality included") {
  const std::vector<double> c{0.7, 0.6, 0.59, 0.6, 0.2, 1.0};
  CHECK(gate_decisions(rule_with(0.6), 4, c) == decisions{1, 1, 0, 1, 0, 1});
  gate_rule inverted = rule_with(0.6);
  inverted.gate = gate_signal::inverted;
  CHECK(gate_decisions(inverted, 4, c) == decisions{0, 0, 1, 0, 1, 0});
}

TEST_CASE("c never falls below 0.15 and reaches 1: tau at the ends") {
  const std::vector<double> c = ramp(50);
  for (const double tau : {0.0, 0.15}) {
    const decisions all = gate_decisions(rule_with(tau), 1, c);
    CHECK(std::count(all.begin(), all.end(), 1) == 50);
  }
  CHECK(gate_decisions(rule_with(1), 1, c).back() == 1);
  const decisions none = gate_decisions(rule_with(1.0000001), 1, c);
  CHECK(std::count(none.begin(), none.end(), 1) == 0);
}

TEST_CASE("hold: tight only after two confident steps before; before P-1 none is") {
  gate_rule rule = rule_with(0.6);
  rule.hold = 2;
  const std::vector<double> c{0.9, 0.9, 0.9, 0.9, 0.1, 0.9, 0.9, 0.9};
  CHECK(gate_decisions(rule, 1, c) == decisions{0, 0, 1, 1, 0, 0, 0, 1});
  rule.gate = gate_signal::inverted;
  CHECK(gate_decisions(rule, 1, std::vector<double>{0.1, 0.1, 0.1, 0.7, 0.1}) ==
        decisions{0, 0, 1, 0, 0});
}

TEST_CASE("smooth: starts at c(P-1), then halves the distance") {
  gate_rule rule = rule_with(0.6);
  rule.smooth = 0.5;
  // c~: 1, 0.5, 0.75, 0.375, 0.6875, 0.59375
  const std::vector<double> c{1.0, 0.0, 1.0, 0.0, 1.0, 0.5};
  CHECK(gate_decisions(rule, 7, c) == decisions{1, 0, 1, 0, 1, 0});
  rule.hold = 1;  // smoothed first, then held
  // c~: 1, 0.75, 0.625, 0.3125
  CHECK(gate_decisions(rule, 7, std::vector<double>{1.0, 0.5, 0.5, 0.0}) == decisions{0, 1, 1, 0});
}

TEST_CASE("tau as a nearest-rank quantile") {
  gate_rule rule;
  rule.tau_is_quantile = true;
  const std::vector<double> c{0.5, 0.2, 0.9, 0.4, 0.7};
  const auto tau = [&](double q) {
    rule.tau = q;
    return resolve_tau(rule, c);
  };
  CHECK(tau(0) == 0.2);
  CHECK(tau(0.2) == 0.2);
  CHECK(tau(0.21) == 0.4);
  CHECK(tau(0.5) == 0.5);
  CHECK(tau(0.6) == 0.5);
  CHECK(tau(0.7) == 0.7);
  CHECK(tau(1) == 0.9);
  const std::vector<double> hundred = ramp(100);  // 0.07 * 100 is above 7 in binary
  rule.tau = 0.07;
  CHECK(resolve_tau(rule, hundred) == hundred[6]);
  CHECK_THROWS_AS(resolve_tau(rule, {}), std::invalid_argument);
  CHECK_THROWS_AS(resolve_tau(rule, std::vector<double>{0.1, std::nan("")}), std::domain_error);
  CHECK(resolve_tau(rule_with(0.3), {}) == 0.3);
}

TEST_CASE("shuffled: a permutation, the same for a seed, another for another") {
  gate_rule rule = rule_with(0.6);
  rule.gate = gate_signal::shuffled;
  rule.seed = 5;
  const std::vector<double> c = ramp(200);
  const std::vector<double> once = gate_input(rule, c);
  CHECK(once != c);
  CHECK(gate_input(rule, c) == once);
  std::vector<double> sorted = once;
  std::sort(sorted.begin(), sorted.end());
  CHECK(sorted == c);
  rule.seed = 6;
  CHECK(gate_input(rule, c) != once);
  const decisions shuffled = gate_decisions(rule, 1, c);
  const decisions signal = gate_decisions(rule_with(0.6), 1, c);
  CHECK(shuffled != signal);
  CHECK(std::count(shuffled.begin(), shuffled.end(), 1) ==
        std::count(signal.begin(), signal.end(), 1));
  rule.gate = gate_signal::signal;
  CHECK(gate_input(rule, c) == c);
  rule.gate = gate_signal::shuffled;
  CHECK(gate_input(rule, {}).empty());
  CHECK(gate_input(rule, std::vector<double>{0.5}) == std::vector<double>{0.5});
}

TEST_CASE("shuffled: every position is equally likely to come first") {
  gate_rule rule;
  rule.gate = gate_signal::shuffled;
  const std::vector<double> c{0, 1, 2, 3};
  std::vector<int> first(4);
  for (rule.seed = 0; rule.seed < 4000; ++rule.seed) {
    ++first[static_cast<size_t>(gate_input(rule, c)[0])];
  }
  for (const int count : first) {  // mean 1000, deviation 27
    CHECK(count > 860);
    CHECK(count < 1140);
  }
}

TEST_CASE("random: tight with probability p, by seed and step, whatever c is") {
  gate_rule rule = rule_with(0.6);
  rule.gate = gate_signal::random;
  rule.hold = 3;  // does not apply: the decision itself is drawn
  const std::vector<double> c(10000, std::nan(""));
  for (const double p : {0.0, 0.1, 0.5, 1.0}) {
    rule.p = p;
    const decisions drawn = gate_decisions(rule, 1, c);
    const auto tight = static_cast<double>(std::count(drawn.begin(), drawn.end(), 1));
    CHECK(std::abs(tight - p * 10000) <= 5 * std::sqrt(p * (1 - p) * 10000));
  }
  rule.p = 0.5;
  const decisions at_one = gate_decisions(rule, 1, c), at_three = gate_decisions(rule, 3, c);
  CHECK(std::equal(at_one.begin() + 2, at_one.end(), at_three.begin()));  // by step, not by place
  rule.seed = 1;
  CHECK(gate_decisions(rule, 1, c) != at_one);
}

TEST_CASE("decisions at once equal the state advanced step by step, also after a snapshot") {
  const std::vector<double> c = ramp(60);
  for (const gate_signal signal : {gate_signal::signal, gate_signal::shuffled, gate_signal::random,
                                   gate_signal::constant, gate_signal::inverted}) {
    gate_rule rule = rule_with(0.5);
    rule.gate = signal;
    rule.smooth = 0.3;
    rule.hold = 2;
    rule.seed = 11;
    const std::vector<double> seen = gate_input(rule, c);
    gate_state state(rule, resolve_tau(rule, c));
    decisions stepped;
    for (size_t i = 0; i < seen.size(); ++i) {
      const gate_state snapshot = state;
      const auto step = static_cast<std::int64_t>(i) + 9;
      state.advance(step, 0.123);
      state = snapshot;
      stepped.push_back(state.advance(step, seen[i]) ? 1 : 0);
    }
    CHECK(stepped == gate_decisions(rule, 10, c));
  }
}

TEST_CASE("a decision does not depend on later confidence") {
  gate_rule rule = rule_with(0.5);
  rule.smooth = 0.5;
  rule.hold = 1;
  std::vector<double> c = ramp(40);
  const decisions before = gate_decisions(rule, 1, c);
  for (size_t i = 20; i < c.size(); ++i) c[i] = 0.2;
  const decisions after = gate_decisions(rule, 1, c);
  CHECK(std::equal(before.begin(), before.begin() + 20, after.begin()));
}

TEST_CASE("steps out of order and NaN are refused") {
  gate_state state(rule_with(0.5), 0.5);
  CHECK(state.tau() == 0.5);
  state.advance(5, 0.7);
  CHECK_THROWS_AS(state.advance(7, 0.7), std::invalid_argument);
  CHECK_THROWS_AS(state.advance(5, 0.7), std::invalid_argument);
  CHECK(state.advance(6, 0.7));
  CHECK_THROWS_WITH_AS(state.advance(7, std::nan("")), "gate: confidence of step 7 is NaN",
                       std::domain_error);
}

}  // namespace
}  // namespace kvreplay::policies
