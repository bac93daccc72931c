#include "reports/result.hpp"

#include <fmt/format.h>

#include <cmath>
#include <set>

#include "reports/text.hpp"

namespace kvreplay::reports {
namespace {

bool same(const maybe& a, const maybe& b) {
  if (!a || !b) return a.has_value() == b.has_value();
  return *a == *b || (std::isnan(*a) && std::isnan(*b));
}

std::string show(const maybe& value) { return value ? fmt::format("{}", *value) : "nothing"; }

std::string show(const std::string& value) {
  return '"' + escape_bytes(value, controls::none) + '"';
}

using number_map = std::map<std::string, maybe>;

// Every number but the times, by its flattened name; interval ends included.
number_map numbers_of(const result& r) {
  number_map out;
  for_each_number(r, [&](std::string_view section, std::string_view name, const maybe& value) {
    if (section != "time") out[fmt::format("{}.{}", section, name)] = value;
  });
  for (const auto& [name, ends] : r.quality_ci) {
    out[fmt::format("quality_ci.{}.low", name)] = ends.first;
    out[fmt::format("quality_ci.{}.high", name)] = ends.second;
  }
  return out;
}

void compare_numbers(const result& a, const result& b, const std::string& where,
                     std::vector<std::string>& out) {
  const number_map left = numbers_of(a), right = numbers_of(b);
  std::set<std::string> names;
  for (const auto& [name, value] : left) names.insert(name);
  for (const auto& [name, value] : right) names.insert(name);
  for (const std::string& name : names) {
    const auto l = left.find(name), r = right.find(name);
    const std::string key = where + escape_bytes(name, controls::none);
    if (l == left.end()) {
      out.push_back(fmt::format("{}: absent against {}", key, show(r->second)));
    } else if (r == right.end()) {
      out.push_back(fmt::format("{}: {} against absent", key, show(l->second)));
    } else if (!same(l->second, r->second)) {
      out.push_back(fmt::format("{}: {} against {}", key, show(l->second), show(r->second)));
    }
  }
}

std::string join(const std::vector<std::pair<std::string, std::string>>& params) {
  std::string out;
  for (const auto& [name, value] : params) out += (out.empty() ? "" : ",") + name + "=" + value;
  return out;
}

void compare_texts(const result& a, const result& b, const std::string& where,
                   std::vector<std::string>& out) {
  const auto check = [&](const char* name, const std::string& l, const std::string& r) {
    if (l != r) out.push_back(fmt::format("{}{}: {} against {}", where, name, show(l), show(r)));
  };
  check("trace", a.trace, b.trace);
  check("trace_fingerprint", a.trace_fingerprint, b.trace_fingerprint);
  check("layers", a.layers, b.layers);
  check("policy", a.policy, b.policy);
  check("name", a.name, b.name);
  check("precision", a.precision, b.precision);
  check("mode", a.mode, b.mode);
  check("status", a.status, b.status);
  check("note", a.note, b.note);
  check("gap_reference", a.gap_reference, b.gap_reference);
  check("sequence", std::to_string(a.sequence), std::to_string(b.sequence));
  check("seed", std::to_string(a.seed), std::to_string(b.seed));
  if (a.params != b.params) {
    out.push_back(
        fmt::format("{}params: {} against {}", where, show(join(a.params)), show(join(b.params))));
  }
}

// The first part that differs is named: the rest follows from it.
void compare_details(const result& a, const result& b, const std::string& where,
                     std::vector<std::string>& out) {
  if (!a.details || !b.details) return;
  const row_details &l = *a.details, &r = *b.details;
  const auto check = [&](const char* name, bool same_part) {
    if (!same_part) out.push_back(fmt::format("{}details.{}: differ", where, name));
  };
  // A trimmed row has the needle alone.
  if (!l.series.empty() && !r.series.empty()) {
    check("series", l.series == r.series);
    check("confidence_histogram", l.confidence_histogram == r.confidence_histogram);
    check("heads", l.heads == r.heads);
  }
  check("needle", l.needle == r.needle);
}

}  // namespace

result finite(const result& r) {
  result out = r;
  std::string fields;
  const auto name_field = [&](const std::string& field, double value) {
    fields += fmt::format("{}{} was {}", fields.empty() ? "" : ", ", field, value);
  };
  for_each_number(out, [&](std::string_view section, std::string_view name, maybe& value) {
    if (!value || std::isfinite(*value)) return;
    name_field(fmt::format("{}.{}", section, name), *value);
    value.reset();
  });
  for (const auto& [name, ends] : r.quality_ci) {
    if (std::isfinite(ends.first) && std::isfinite(ends.second)) continue;
    name_field("quality_ci." + name, std::isfinite(ends.first) ? ends.second : ends.first);
    out.quality_ci.erase(name);
  }
  if (out.details) drop_non_finite(*out.details);
  if (!fields.empty()) out.note += (out.note.empty() ? "" : "; ") + fields;
  return out;
}

std::vector<std::string> differences(const report& a, const report& b) {
  std::vector<std::string> out;
  if (a.runs.size() != b.runs.size()) {
    out.push_back(fmt::format("runs: {} against {}", a.runs.size(), b.runs.size()));
  }
  for (std::size_t i = 0; i < std::min(a.runs.size(), b.runs.size()); ++i) {
    const result &l = a.runs[i], &r = b.runs[i];
    const std::string where =
        fmt::format("run {} ({}, {}, sequence {}): ", i, show(l.policy), show(l.trace), l.sequence);
    compare_texts(l, r, where, out);
    compare_numbers(l, r, where, out);
    compare_details(l, r, where, out);
  }
  return out;
}

}  // namespace kvreplay::reports
