#include <nlohmann/json.hpp>

#include "reports/details_json.hpp"
#include "reports/html_data.hpp"
#include "reports/json.hpp"
#include "reports/text.hpp"

namespace kvreplay::reports {
namespace {

using json = nlohmann::ordered_json;

json text(const std::string& s) { return escape_bytes(s, controls::keep); }

json number(const maybe& value) { return value ? json(*value) : json(nullptr); }

// A section for every number of the walk; counts are whole numbers.
json sections_of(const result& r) {
  json out = {
      {"tokens",
       {{"prompt", r.tokens.prompt}, {"decoded", r.tokens.decoded}, {"scored", r.tokens.scored}}}};
  for_each_number(r, [&](std::string_view section, std::string_view name, const maybe& value) {
    if (section == "tokens") return;
    out[std::string(section)][escape_bytes(name, controls::keep)] = number(value);
  });
  return out;
}

json row(const result& given) {
  const result r = finite(given);
  json params = json::object(), intervals = json::object();
  for (const auto& [name, value] : r.params)
    params[escape_bytes(name, controls::keep)] = text(value);
  for (const auto& [name, ends] : r.quality_ci) {
    intervals[escape_bytes(name, controls::keep)] = {ends.first, ends.second};
  }
  json out = {{"trace", text(r.trace)},
              {"trace_fingerprint", text(r.trace_fingerprint)},
              {"sequence", r.sequence},
              {"layers", text(r.layers)},
              {"policy", text(r.policy)},
              {"name", text(r.name)},
              {"params", params},
              {"precision", text(r.precision)},
              {"mode", text(r.mode)},
              {"seed", r.seed},
              {"status", text(r.status)},
              {"note", text(r.note)},
              {"gap_reference", text(r.gap_reference)}};
  const json sections = sections_of(r);
  for (const auto& [section, values] : sections.items()) {
    out[section] = values;
    if (section == "quality") out["quality_ci"] = intervals;
  }
  if (r.details) out["details"] = detail::details_to_json(*r.details);
  return out;
}

json tool(const tool_info& t) {
  return {{"version", text(t.version)}, {"revision", text(t.revision)}, {"device", text(t.device)},
          {"threads", t.threads},       {"hdf5", text(t.hdf5)},         {"cuda", text(t.cuda)},
          {"command", text(t.command)}, {"compiler", text(t.compiler)}, {"cpu", text(t.cpu)}};
}

// Keys of a row one a line, but `details`, which are long lists, on one.
std::string indented_row(json row) {
  std::string details;
  if (const auto found = row.find("details"); found != row.end()) {
    details = found->dump();
    row.erase(found);
  }
  std::string out;
  for (const char c : row.dump(1)) {
    out += c;
    if (c == '\n') out += "  ";
  }
  if (!details.empty()) {
    out.resize(out.size() - 4);  // "\n  }"
    out += ",\n   \"details\": " + details + "\n  }";
  }
  return out;
}

}  // namespace

std::string to_json(const report& r) {
  const json all = {{"schema", results_schema}, {"tool", tool(r.tool)}};
  std::string out = all.dump(1);
  out.resize(out.size() - 2);  // "\n}"
  out += ",\n \"runs\": [";
  for (std::size_t i = 0; i < r.runs.size(); ++i) {
    out += i > 0 ? ",\n  " : "\n  ";
    out += indented_row(row(r.runs[i]));
  }
  out += r.runs.empty() ? "]\n}" : "\n ]\n}";
  return detail::safe_in_html(out) + "\n";
}

std::string to_json_line(const result& r) { return detail::safe_in_html(row(r).dump()); }

}  // namespace kvreplay::reports
