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

  // c(t) -> tight. Steps must come one by one, P-1 first (std::invalid_argument otherwise); a NaN
  // is a std::domain_error. c, smooth and hold are ignored by gate=random, whose decision is drawn,
  // and by gate=constant, which has one budget and always answers false.
  bool advance(std::int64_t step, double c);
  double tau() const { return tau_; }

 private:
  gate_rule rule_;
  double tau_;
  bool started_ = false;
  std::int64_t last_step_ = 0;
  double smoothed_ = 0;
  std::int64_t run_ = 0;  // consecutive steps with smoothed c on the tight side
};

// tau as a number: the rule's own, or the nearest-rank quantile of c(P-1 .. T-1). gate=random and
// constant do not ask for c.
double resolve_tau(const gate_rule& rule, std::span<const double> c);

// The c each step sees: the recorded ones, or (gate=shuffled) permuted by seed. c[0] is c(P-1).
std::vector<double> gate_input(const gate_rule& rule, std::span<const double> c);

// Decisions for steps P-1 .. T-1 at once (open loop).
std::vector<std::uint8_t> gate_decisions(const gate_rule& rule, std::int64_t n_prompt,
                                         std::span<const double> c);

}  // namespace kvreplay::policies
