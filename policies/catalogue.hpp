// The catalogue: every policy and modifier, each defined in one file beside this one, named as on
// the command line.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/params.hpp"
#include "policies/policy.hpp"

namespace kvreplay::policies {

struct entry {
  std::string_view name = {};
  std::string_view kind = {};        // "policy", "modifier" or "precision" (how entries are stored)
  std::string_view slot = {};        // modifiers of one slot exclude each other; empty: no slot
  std::string_view idea = {};        // two sentences
  std::string_view source = {};      // paper, arXiv id, or "baseline"
  std::string_view needs = {};       // in words, for the manual page
  std::string_view deviations = {};  // from the published code; may be empty
  std::string_view example = {};     // one SPEC
  std::string_view trigger = "every";  // the trigger where the SPEC names none
  bool composes = true;                // false: no modifier but a precision applies (`full`)
  bool gates = false;  // true: brings two budgets in place of budget= (`confidence`)
  // Declares and reads the parameters, writes the rules. The same call documents (params.hpp).
  void (*apply)(param_reader& params, policy& out) = nullptr;
};

std::span<const entry> catalogue();
// adakv and headkv are policies and modifiers: `policy` says which is meant.
const entry* find_entry(std::string_view name, bool policy);

// The names of a kind, in order; of all kinds where it is empty.
std::vector<std::string_view> entry_names(std::string_view kind = {});

// The declarations of an entry's parameters, as its parser makes them.
std::vector<param_doc> entry_params(const entry& e);

// True where `modifier` may follow `base` after a '+', by the same rules as in parse_policy.
bool fits(const entry& base, const entry& modifier);

// The manual page of one entry, or the list of all, as text. Pure functions; main prints.
std::string manual_page(std::string_view name);  // throws spec_error for an unknown name
std::string catalogue_table();

}  // namespace kvreplay::policies
