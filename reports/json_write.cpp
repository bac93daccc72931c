#include <nlohmann/json.hpp>

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
  return out;
}

json tool(const tool_info& t) {
  return {{"version", text(t.version)}, {"revision", text(t.revision)}, {"device", text(t.device)},
          {"threads", t.threads},       {"hdf5", text(t.hdf5)},         {"cuda", text(t.cuda)},
          {"command", text(t.command)}, {"compiler", text(t.compiler)}, {"cpu", text(t.cpu)}};
}

// These characters stand only inside strings of a JSON text, so they can be replaced anywhere.
std::string safe_in_html(const std::string& dumped) {
  std::string out;
  out.reserve(dumped.size());
  for (std::size_t i = 0; i < dumped.size(); ++i) {
    const std::string_view here(dumped.data() + i, std::min<std::size_t>(3, dumped.size() - i));
    if (here == "\u2028" || here == "\u2029") {
      out += here == "\u2028" ? "\\u2028" : "\\u2029";
      i += 2;
    } else if (dumped[i] == '<') {
      out += "\\u003c";
    } else if (dumped[i] == '>') {
      out += "\\u003e";
    } else if (dumped[i] == '&') {
      out += "\\u0026";
    } else {
      out += dumped[i];
    }
  }
  return out;
}

}  // namespace

std::string to_json(const report& r) {
  json runs = json::array();
  for (const result& run : r.runs) runs.push_back(row(run));
  const json all = {{"schema", results_schema}, {"tool", tool(r.tool)}, {"runs", std::move(runs)}};
  return safe_in_html(all.dump(1)) + "\n";
}

std::string to_json_line(const result& r) { return safe_in_html(row(r).dump()); }

}  // namespace kvreplay::reports
