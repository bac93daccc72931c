#include <fmt/format.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "reports/details_json.hpp"
#include "reports/json.hpp"
#include "reports/text.hpp"

namespace kvreplay::reports {
namespace {

using json = nlohmann::ordered_json;

// An object whose keys are taken one by one; what nobody took is unknown.
class object_reader {
 public:
  object_reader(const json& value, std::string where) : value_(value), where_(std::move(where)) {
    if (!value.is_object()) fail("", fmt::format("is {}, expected an object", value.type_name()));
  }

  [[noreturn]] void fail(const std::string& key, const std::string& what) const {
    const std::string dot = where_.ends_with(": ") || key.empty() ? "" : ".";
    throw report_error(escape_bytes(where_ + dot + key + ": " + what, controls::none));
  }

  const json* find(const std::string& key) {
    taken_.insert(key);
    const auto it = value_.find(key);
    return it == value_.end() ? nullptr : &*it;
  }

  const json& need(const std::string& key) {
    const json* found = find(key);
    if (found == nullptr) fail(key, "is missing");
    return *found;
  }

  std::string path(const std::string& key) const {
    return where_ + (where_.ends_with(": ") ? "" : ".") + key;
  }

  void text(const std::string& key, std::string& out, bool required = false) {
    const json* found = required ? &need(key) : find(key);
    if (found == nullptr) return;
    if (!found->is_string()) fail(key, fmt::format("is {}, expected a text", found->type_name()));
    out = unescape_bytes(found->get_ref<const std::string&>());
  }

  template <typename Integer>
  void integer(const std::string& key, Integer& out, std::int64_t low) {
    const json* found = find(key);
    if (found == nullptr) return;
    const bool fits = found->is_number_integer() &&
                      !(found->is_number_unsigned() &&
                        found->get<std::uint64_t>() > std::numeric_limits<std::int64_t>::max());
    const std::int64_t value = fits ? found->get<std::int64_t>() : 0;
    if (!fits || value < low || value > std::numeric_limits<Integer>::max()) {
      fail(key, fmt::format("is {}, expected a whole number from {} to {}", shown(*found), low,
                            std::numeric_limits<Integer>::max()));
    }
    out = static_cast<Integer>(value);
  }

  void number(const std::string& key, maybe& out) {
    const json* found = find(key);
    if (found == nullptr || found->is_null()) return;
    out = number_of(key, *found);
  }

  double number_of(const std::string& key, const json& value) const {
    if (!value.is_number()) fail(key, fmt::format("is {}, expected a number", value.type_name()));
    return value.get<double>();
  }

  const json& value() const { return value_; }
  bool taken(const std::string& key) const { return taken_.count(key) > 0; }

  void refuse_unknown() const {
    for (const auto& [key, value] : value_.items()) {
      if (!taken(key)) fail(key, "is not a key of this schema");
    }
  }

 private:
  static std::string shown(const json& value) {
    return value.is_number() ? value.dump() : std::string(value.type_name());
  }

  const json& value_;
  std::string where_;
  std::set<std::string> taken_;
};

// Numbers of one section, by the walk; returns the reader for what else the section holds.
void read_section(object_reader& row, std::string_view wanted, result& out) {
  const json* found = row.find(std::string(wanted));
  if (found == nullptr) return;
  object_reader section(*found, row.path(std::string(wanted)));
  for_each_number(out, [&](std::string_view name_of_section, std::string_view name, maybe& value) {
    if (name_of_section == wanted) section.number(std::string(name), value);
  });
  if (wanted != "quality") return section.refuse_unknown();
  std::map<std::string, maybe> more;
  for (const auto& [key, value] : section.value().items()) {
    if (section.taken(key)) continue;
    more[unescape_bytes(key)] = value.is_null() ? maybe() : section.number_of(key, value);
  }
  for (const auto& [name, value] : more) out.quality.more.push_back({name, value});
}

void read_tokens(object_reader& row, result& out) {
  const json* found = row.find("tokens");
  if (found == nullptr) return;
  object_reader tokens(*found, row.path("tokens"));
  tokens.integer("prompt", out.tokens.prompt, 0);
  tokens.integer("decoded", out.tokens.decoded, 0);
  tokens.integer("scored", out.tokens.scored, 0);
  tokens.refuse_unknown();
}

void read_params(object_reader& row, result& out) {
  const json* found = row.find("params");
  if (found == nullptr) return;
  object_reader params(*found, row.path("params"));
  for (const auto& [key, value] : found->items()) {
    std::string text;
    params.text(key, text);
    out.params.emplace_back(unescape_bytes(key), text);
  }
}

void read_intervals(object_reader& row, result& out) {
  const json* found = row.find("quality_ci");
  if (found == nullptr) return;
  const object_reader intervals(*found, row.path("quality_ci"));
  for (const auto& [key, value] : found->items()) {
    if (!value.is_array() || value.size() != 2) intervals.fail(key, "is not [low, high]");
    out.quality_ci[unescape_bytes(key)] = {intervals.number_of(key, value[0]),
                                           intervals.number_of(key, value[1])};
  }
}

result read_row(const json& value, const std::string& where) {
  object_reader row(value, where);
  result out;
  row.text("trace", out.trace, true);
  row.text("trace_fingerprint", out.trace_fingerprint);
  row.integer("sequence", out.sequence, -1);  // -1: a mean over sequences
  row.text("layers", out.layers);
  row.text("policy", out.policy, true);
  row.text("name", out.name);
  read_params(row, out);
  row.text("precision", out.precision);
  row.text("mode", out.mode, true);
  row.integer("seed", out.seed, std::numeric_limits<std::int64_t>::min());
  row.text("status", out.status, true);
  row.text("note", out.note);
  row.text("gap_reference", out.gap_reference);
  if (out.mode != "open" && out.mode != "closed" && out.mode != "time") {
    row.fail("mode", "is none of open, closed, time");
  }
  if (out.status != "ok" && out.status != "failed") row.fail("status", "is neither ok nor failed");
  read_tokens(row, out);
  for (const char* name : {"memory", "quality", "confidence", "events", "time", "match", "sweep"}) {
    read_section(row, name, out);
  }
  read_intervals(row, out);
  if (const json* found = row.find("details")) {
    out.details = detail::details_from_json(*found, row.path("details"));
  }
  row.refuse_unknown();
  return out;
}

tool_info read_tool(const json& value, const std::string& where) {
  object_reader tool(value, where);
  tool_info out;
  tool.text("version", out.version);
  tool.text("revision", out.revision);
  tool.text("device", out.device);
  tool.integer("threads", out.threads, 0);
  tool.text("hdf5", out.hdf5);
  tool.text("cuda", out.cuda);
  tool.text("command", out.command);
  tool.text("compiler", out.compiler);
  tool.text("cpu", out.cpu);
  tool.refuse_unknown();
  return out;
}

// The library takes the last of two equal keys silently; here they are an error. Nesting is bounded
// by what the schema has, so a hostile file cannot make the tree deep.
json parse(std::string_view text, const std::string& where) {
  std::vector<std::set<std::string>> keys;
  const auto fail = [&](const std::string& what) {
    throw report_error(escape_bytes(where + ": " + what, controls::none));
  };
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (depth > 8) fail("is nested deeper than a results file");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second) {
      fail(fmt::format("key {} stands twice in one object", value.get<std::string>()));
    }
    return true;
  };
  try {
    return json::parse(text.begin(), text.end(), watch);
  } catch (const json::exception& error) {
    fail(fmt::format("is not JSON: {}", error.what()));
  }
  return {};
}

}  // namespace

report read_json(std::string_view text, const std::string& file) {
  const json all = parse(text, file);
  object_reader top(all, file + ": ");
  const json& schema = top.need("schema");
  if (!schema.is_string() || schema.get<std::string>() != results_schema) {
    top.fail("schema", fmt::format("is {:.60}, expected \"{}\"",
                                   schema.is_string() ? schema.get<std::string>()
                                                      : std::string(schema.type_name()),
                                   results_schema));
  }
  report out;
  if (const json* tool = top.find("tool")) out.tool = read_tool(*tool, top.path("tool"));
  const json& runs = top.need("runs");
  if (!runs.is_array()) top.fail("runs", "is not a list");
  for (std::size_t i = 0; i < runs.size(); ++i) {
    out.runs.push_back(read_row(runs[i], top.path(fmt::format("runs[{}]", i))));
  }
  top.refuse_unknown();
  return out;
}

result read_json_line(std::string_view text, const std::string& where) {
  return read_row(parse(text, where), where + ": ");
}

}  // namespace kvreplay::reports
