// Groups of parameters that several catalogue entries share. Each is read where it is defined:
// read_budget, read_mass and read_pool in parts.cpp, the others in the file of their name.
#pragma once

#include <optional>
#include <string_view>

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

// All keys of confkv, snapkv, trimkv: policies that others are made of.
void read_confkv(param_reader& params, policy& out);
void read_snapkv(param_reader& params, policy& out);
void read_trimkv(param_reader& params, policy& out);

// kernel=, pool= of scores that are pooled over neighbours.
void read_pool(param_reader& params, policy& out);

// How a budget is divided over heads: the keys of adakv, headkv and global, after
// start_division, which throws spec_error where the policy divides its budget already or keeps one
// set for all heads.
void start_division(policy& out, std::string_view name, division_kind kind);
void read_adakv(param_reader& params, policy& out);
void read_headkv(param_reader& params, policy& out);
void read_global(param_reader& params, policy& out);

}  // namespace kvreplay::policies
