#include "replay/labels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "policies/catalogue.hpp"
#include "policies/policy.hpp"
#include "reports/table.hpp"

namespace kvreplay::replay {
namespace {

using parameters = std::vector<std::pair<std::string, std::string>>;

// "pyramid" of "pyramid.beta"; empty for the policy's own keys.
std::string owner_of(const std::string& key) {
  const auto dot = key.find('.');
  return dot == std::string::npos ? "" : key.substr(0, dot);
}

bool has_owner(const parameters& params, const std::string& owner) {
  return std::any_of(params.begin(), params.end(),
                     [&](const auto& p) { return owner_of(p.first) == owner; });
}

// What a row's parameters are where the SPEC says nothing: those of its policy and modifiers named
// bare. Budgets count as said always, and so does the first key of a modifier that nothing else
// shows (a precision has a column, a trigger may be there unsaid): a label shows them.
parameters default_params(const reports::result& row) {
  std::string modifiers;
  std::string last;
  for (const auto& [key, value] : row.params) {
    const auto owner = owner_of(key);
    if (owner.empty() || owner == last) continue;
    last = owner;
    modifiers += fmt::format("+{}", last);
  }
  for (const char* required : {"", ":budget=1", ":budget=1,table=t", ":file=f"}) {
    try {
      const auto bare = policies::parse_policy(fmt::format("{}{}", row.name, required)).params;
      const auto all =
          policies::parse_policy(fmt::format("{}{}{}", row.name, required, modifiers)).params;
      parameters shown_where_other;
      last.clear();
      for (const auto& p : all) {
        const auto owner = owner_of(p.first);
        const bool first = owner != last;
        last = owner;
        const bool always = p.first == "budget" || p.first == "high" || p.first == "low" ||
                            p.first == "table" || p.first == "file";
        if (always) continue;
        if (first && !owner.empty() && owner != row.precision && !has_owner(bare, owner)) continue;
        shown_where_other.push_back(p);
      }
      return shown_where_other;
    } catch (const policies::spec_error&) {
      continue;  // something in it is required: everything is shown
    }
  }
  return {};
}

// "+rerotate": modifiers without parameters, which no changed parameter shows. Precisions have a
// column, and a trigger of the policy's own goes unsaid.
std::string bare_modifiers(const reports::result& row) {
  const auto* entry = policies::find_entry(row.name, true);
  std::string out;
  std::string_view rest = row.policy;
  while (rest.find('+') != std::string_view::npos) {
    rest.remove_prefix(rest.find('+') + 1);
    const auto part = rest.substr(0, rest.find('+'));
    const bool implied = part == row.precision || (entry != nullptr && part == entry->trigger);
    if (part.find(':') == std::string_view::npos && !implied) out += fmt::format("+{}", part);
  }
  return out;
}

}  // namespace

std::vector<std::string> labels_of(std::span<const reports::result> rows) {
  std::vector<std::string> out;
  for (const auto& row : rows) {
    out.push_back(reports::short_policy(row, default_params(row)) + bare_modifiers(row));
  }
  return out;
}

std::vector<std::string> note_lines(std::span<const reports::result> rows,
                                    std::span<const std::string> labels) {
  std::vector<std::pair<std::string, std::vector<std::string>>> lines;
  for (size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].status != "ok") continue;
    std::string_view rest = rows[i].note;
    while (!rest.empty()) {
      const auto end = rest.find("; ");
      const std::string part(rest.substr(0, end));
      rest = end == std::string_view::npos ? std::string_view{} : rest.substr(end + 2);
      auto at =
          std::find_if(lines.begin(), lines.end(), [&](const auto& l) { return l.first == part; });
      if (at == lines.end()) at = lines.insert(at, {part, {}});
      at->second.push_back(labels[i]);
    }
  }
  std::vector<std::string> out;
  for (const auto& [part, about] : lines) {
    const bool all = about.size() == rows.size() && rows.size() > 1;
    out.push_back(all ? part : fmt::format("{}: {}", part, fmt::join(about, "; ")));
  }
  return out;
}

}  // namespace kvreplay::replay
