// Groups of parameters that several catalogue entries share. Each is read where it is defined:
// read_budget and read_mass in parts.cpp, read_gate in confidence.cpp, read_pyramid in pyramid.cpp,
// read_confkv in confkv.cpp.
#pragma once

#include <optional>

#include "policies/params.hpp"
#include "policies/policy.hpp"

namespace kvreplay::policies {

// budget=, required unless `+confidence` follows (out.budget.gated is then set already).
void read_budget(param_reader& params, policy& out);

// gqa= and scope= of a score made of attention mass.
void read_mass(param_reader& params, policy& out, score_scope scope);

// tau=, high=, low= and everything else of the gate. No fallback: high and low are required.
void read_gate(param_reader& params, policy& out, std::optional<amount> high,
               std::optional<amount> low);

// beta=, total=, exact=.
void read_pyramid(param_reader& params, policy& out, double beta);

// All keys of confkv.
void read_confkv(param_reader& params, policy& out);

}  // namespace kvreplay::policies
