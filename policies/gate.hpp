// The confidence gate: one small state per sequence, advanced once per step (POLICIES, "The gate").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/policy.hpp"

namespace kvreplay::policies {

// Copyable: part of a lane's snapshot.
class gate_state {
 public:
  explicit gate_state(const gate_rule& rule, double tau);

  // c(t) -> tight. Steps must come in order, P-1 first. c is ignored by gate=random and constant.
  bool advance(std::int64_t step, double c);
  double tau() const { return tau_; }

 private:
  gate_rule rule_;
  double tau_;
  bool started_ = false;
  double smoothed_ = 0;
  std::int64_t run_ = 0;  // consecutive steps with smoothed c on the tight side
};

// tau as a number: the rule's own, or the nearest-rank quantile of c(P-1 .. T-1).
double resolve_tau(const gate_rule& rule, std::span<const double> c);

// The c each step sees: the recorded ones, or (gate=shuffled) permuted by seed. c[0] is c(P-1).
std::vector<double> gate_input(const gate_rule& rule, std::span<const double> c);

// Decisions for steps P-1 .. T-1 at once (open loop).
std::vector<std::uint8_t> gate_decisions(const gate_rule& rule, std::int64_t n_prompt,
                                         std::span<const double> c);

}  // namespace kvreplay::policies
