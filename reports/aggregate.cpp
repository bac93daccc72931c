#include "reports/aggregate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "reports/bootstrap.hpp"

namespace kvreplay::reports {
namespace {

using members = std::vector<const result*>;

bool is_largest(std::string_view section, std::string_view name) {
  return section == "memory" && name.find("peak") != std::string_view::npos && name != "peak_ratio";
}

// Values of one number over the rows; empty unless every row has it.
std::vector<double> values_of(const members& rows, std::string_view section,
                              std::string_view name) {
  std::vector<double> out;
  for (const result* row : rows) {
    for_each_number(*row, [&](std::string_view s, std::string_view n, const maybe& value) {
      if (s == section && n == name && value) out.push_back(*value);
    });
  }
  if (out.size() != rows.size()) out.clear();
  return out;
}

double mean_of(const std::vector<double>& values) {
  double sum = 0;
  for (const double v : values) sum += v;
  return sum / static_cast<double>(values.size());
}

result merge(const members& rows) {
  result out = *rows.front();
  out.sequence = -1;
  out.note.clear();
  out.quality_ci.clear();
  out.trace_fingerprint.clear();
  std::set<std::string> traces, notes;
  for (const result* row : rows) {
    traces.insert(row->trace);
    if (!row->note.empty() && notes.insert(row->note).second) {
      out.note += fmt::format("{}{}", out.note.empty() ? "" : "; ", row->note);
    }
  }
  if (traces.size() > 1) out.trace = fmt::format("{} traces", traces.size());
  for_each_number(out, [&](std::string_view section, std::string_view name, maybe& value) {
    const auto values = values_of(rows, section, name);
    value.reset();
    if (values.empty()) return;
    if (section == "tokens") {
      value = mean_of(values) * static_cast<double>(values.size());
    } else if (is_largest(section, name)) {
      value = *std::max_element(values.begin(), values.end());
    } else {
      value = mean_of(values);
    }
    if (section != "quality") return;
    std::vector<std::vector<double>> sequences;
    for (const double v : values) sequences.push_back({v});
    if (const auto interval = bootstrap_mean(sequences, {.min_sequences = 2})) {
      out.quality_ci[std::string(name)] = *interval;
    }
  });
  out.pareto.reset();
  out.details.reset();
  out.sequences = static_cast<double>(rows.size());
  return out;
}

}  // namespace

std::vector<result> aggregate(std::span<const result> rows) {
  std::vector<std::pair<std::pair<std::string, std::string>, members>> groups;
  for (const auto& row : rows) {
    if (row.status != "ok") continue;
    const std::pair key{row.policy, row.mode};
    auto at =
        std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == key; });
    if (at == groups.end()) at = groups.insert(groups.end(), {key, {}});
    at->second.push_back(&row);
  }
  std::vector<result> out;
  for (const auto& [key, group] : groups) {
    if (group.size() > 1) out.push_back(merge(group));
  }
  return out;
}

}  // namespace kvreplay::reports
