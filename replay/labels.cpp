#include "replay/labels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "policies/policy.hpp"
#include "reports/table.hpp"

namespace kvreplay::replay {
namespace {

// What a row's parameters are where the SPEC says nothing: those of its policy and modifiers named
// bare. Budgets count as said always, so that a label shows them.
std::vector<std::pair<std::string, std::string>> default_params(const reports::result& row) {
  std::string modifiers;
  std::string last;
  for (const auto& [key, value] : row.params) {
    const auto dot = key.find('.');
    if (dot == std::string::npos || key.substr(0, dot) == last) continue;
    last = key.substr(0, dot);
    modifiers += fmt::format("+{}", last);
  }
  for (const char* required : {"", ":budget=1"}) {
    try {
      auto params =
          policies::parse_policy(fmt::format("{}{}{}", row.name, required, modifiers)).params;
      std::erase_if(params, [](const auto& p) {
        return p.first == "budget" || p.first == "high" || p.first == "low";
      });
      return params;
    } catch (const policies::spec_error&) {
      continue;  // something in it is required: everything is shown
    }
  }
  return {};
}

}  // namespace

std::vector<std::string> labels_of(std::span<const reports::result> rows) {
  std::vector<std::string> out;
  for (const auto& row : rows) out.push_back(reports::short_policy(row, default_params(row)));
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
