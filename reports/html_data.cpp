#include "reports/html_data.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "reports/details_json.hpp"
#include "reports/text.hpp"

namespace kvreplay::reports::detail {
namespace {

using json = nlohmann::ordered_json;

constexpr int page_digits = 7;

json text(const std::string& s) { return escape_bytes(s, controls::none); }

json number(double value) {
  const double short_value = rounded(value, page_digits);
  const bool whole = std::abs(short_value) < 1e15 && short_value == std::floor(short_value);
  return whole ? json(static_cast<std::int64_t>(short_value)) : json(short_value);
}

// A text column: the distinct values, and which one each row has.
class text_column {
 public:
  void add(const std::string& value) {
    const auto [at, is_new] = place_.try_emplace(value, place_.size());
    if (is_new) values_.push_back(text(value));
    index_.push_back(at->second);
  }
  json dump() const { return {{"values", values_}, {"index", index_}}; }

 private:
  std::map<std::string, std::size_t> place_;
  json values_ = json::array();
  std::vector<std::size_t> index_;
};

json texts_of(std::span<const result> rows) {
  text_column trace, fingerprint, layers, policy, name, precision, mode, status, note;
  for (const result& r : rows) {
    trace.add(r.trace);
    fingerprint.add(r.trace_fingerprint);
    layers.add(r.layers);
    policy.add(r.policy);
    name.add(r.name);
    precision.add(r.precision);
    mode.add(r.mode);
    status.add(r.status);
    note.add(r.note);
  }
  return {{"trace", trace.dump()},   {"trace_fingerprint", fingerprint.dump()},
          {"layers", layers.dump()}, {"policy", policy.dump()},
          {"name", name.dump()},     {"precision", precision.dump()},
          {"mode", mode.dump()},     {"status", status.dump()},
          {"note", note.dump()}};
}

// Columns in the order of the first row's walk; names that only some rows have follow.
json numbers_of(std::span<const result> rows) {
  std::map<std::string, std::size_t> place;
  std::vector<std::pair<std::string, json>> columns;
  const json empty(rows.size(), nullptr);
  const auto set = [&](const std::string& column, std::size_t row, const maybe& value) {
    if (!value) return;
    const auto [at, is_new] = place.try_emplace(column, columns.size());
    if (is_new) columns.emplace_back(escape_bytes(column, controls::none), empty);
    columns[at->second].second[row] = number(*value);
  };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    set("sequence", i, rows[i].sequence);
    for_each_number(rows[i],
                    [&](std::string_view section, std::string_view name, const maybe& value) {
                      set(fmt::format("{}.{}", section, name), i, value);
                    });
  }
  json out = json::object();
  for (auto& [name, values] : columns) out[name] = std::move(values);
  return out;
}

json intervals_of(std::span<const result> rows) {
  json out = json::object();
  const json empty(rows.size(), nullptr);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (const auto& [metric, ends] : rows[i].quality_ci) {
      json& column = out[escape_bytes(metric, controls::none)];
      if (column.is_null()) column = {{"low", empty}, {"high", empty}};
      column["low"][i] = number(ends.first);
      column["high"][i] = number(ends.second);
    }
  }
  return out;
}

json files_of(std::span<const report> reports) {
  json out = json::array();
  std::size_t first = 0;
  for (const report& r : reports) {
    const tool_info& t = r.tool;
    out.push_back({{"first", first},
                   {"rows", r.runs.size()},
                   {"command", text(t.command)},
                   {"version", text(t.version)},
                   {"revision", text(t.revision)},
                   {"device", text(t.device)},
                   {"cpu", text(t.cpu)},
                   {"threads", t.threads},
                   {"compiler", text(t.compiler)},
                   {"hdf5", text(t.hdf5)},
                   {"cuda", text(t.cuda)}});
    first += r.runs.size();
  }
  return out;
}

}  // namespace

std::string safe_in_html(const std::string& json_text) {
  std::string out;
  out.reserve(json_text.size());
  for (std::size_t i = 0; i < json_text.size(); ++i) {
    const std::string_view here(json_text.data() + i,
                                std::min<std::size_t>(3, json_text.size() - i));
    if (here == "\u2028" || here == "\u2029") {
      out += here == "\u2028" ? "\\u2028" : "\\u2029";
      i += 2;
    } else if (json_text[i] == '<') {
      out += "\\u003c";
    } else if (json_text[i] == '>') {
      out += "\\u003e";
    } else if (json_text[i] == '&') {
      out += "\\u0026";
    } else {
      out += json_text[i];
    }
  }
  return out;
}

std::string page_data(std::span<const report> reports, std::span<const std::string> labels) {
  std::vector<result> rows;
  for (const report& r : reports) {
    for (const result& run : r.runs) rows.push_back(finite(run));
  }
  if (labels.size() != rows.size()) {
    throw report_error(fmt::format("{} labels for {} rows", labels.size(), rows.size()));
  }
  trim_details(rows);
  json names = json::array(), details = json::object();
  for (const std::string& label : labels) names.push_back(text(label));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (rows[i].details) details[std::to_string(i)] = details_to_json(*rows[i].details);
  }
  const json all = {{"count", rows.size()},
                    {"labels", std::move(names)},
                    {"texts", texts_of(rows)},
                    {"numbers", numbers_of(rows)},
                    {"intervals", intervals_of(rows)},
                    {"details", std::move(details)},
                    {"files", files_of(reports)}};
  return safe_in_html(all.dump());
}

}  // namespace kvreplay::reports::detail
