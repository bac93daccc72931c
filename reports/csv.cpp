#include "reports/csv.hpp"

#include <fmt/format.h>

#include <cmath>
#include <map>
#include <ostream>
#include <set>
#include <sstream>

#include "reports/text.hpp"

namespace kvreplay::reports {
namespace {

std::string number(const maybe& value) {
  return value && std::isfinite(*value) ? fmt::format("{}", *value) : std::string();
}

using cells = std::vector<std::pair<std::string, std::string>>;  // column, field

// Columns that depend on the rows, in name order.
struct open_columns {
  std::set<std::string> params, more, intervals;
};

open_columns columns_of(const std::vector<result>& runs) {
  open_columns out;
  for (const result& r : runs) {
    for (const auto& [name, value] : r.params) out.params.insert(name);
    for (const auto& [name, value] : r.quality.more) out.more.insert(name);
    for (const auto& [name, ends] : r.quality_ci) out.intervals.insert(name);
  }
  return out;
}

void add_params(const result& r, const open_columns& open, cells& out) {
  const std::map<std::string, std::string> params(r.params.begin(), r.params.end());
  for (const std::string& name : open.params) {
    const auto it = params.find(name);
    out.emplace_back("params." + name, it == params.end() ? "" : csv_field(it->second));
  }
}

void add_more(const result& r, const open_columns& open, cells& out) {
  std::map<std::string, maybe> more;
  for (const auto& [name, value] : r.quality.more) more[name] = value;
  for (const std::string& name : open.more) out.emplace_back("quality." + name, number(more[name]));
}

void add_intervals(const result& r, const open_columns& open, cells& out) {
  for (const std::string& name : open.intervals) {
    const auto it = r.quality_ci.find(name);
    const bool has = it != r.quality_ci.end();
    out.emplace_back("quality_ci." + name + ".low", has ? number(it->second.first) : "");
    out.emplace_back("quality_ci." + name + ".high", has ? number(it->second.second) : "");
  }
}

cells row(const result& r, const open_columns& open) {
  cells out = {{"trace", csv_field(r.trace)},
               {"trace_fingerprint", csv_field(r.trace_fingerprint)},
               {"sequence", std::to_string(r.sequence)},
               {"layers", csv_field(r.layers)},
               {"policy", csv_field(r.policy)},
               {"name", csv_field(r.name)}};
  add_params(r, open, out);
  out.insert(out.end(), {{"precision", csv_field(r.precision)},
                         {"mode", csv_field(r.mode)},
                         {"seed", std::to_string(r.seed)},
                         {"status", csv_field(r.status)},
                         {"note", csv_field(r.note)},
                         {"gap_reference", csv_field(r.gap_reference)}});
  std::string last;
  result fixed = r;
  fixed.quality.more.clear();
  for_each_number(std::as_const(fixed),
                  [&](std::string_view section, std::string_view name, const maybe& value) {
                    if (last == "quality" && section != "quality") {
                      add_more(r, open, out);
                      add_intervals(r, open, out);
                    }
                    last = section;
                    out.emplace_back(fmt::format("{}.{}", section, name), number(value));
                  });
  return out;
}

void append_line(const cells& fields, bool names, std::string& out) {
  for (std::size_t i = 0; i < fields.size(); ++i) {
    if (i > 0) out += ',';
    out += names ? csv_field(fields[i].first) : fields[i].second;
  }
  out += '\n';
}

std::string key(const row_key& k) {
  return fmt::format("{},{},{},{}", csv_field(k.trace), csv_field(k.policy), csv_field(k.mode),
                     k.sequence);
}

template <typename Row>
std::string all_rows(std::string_view header, std::span<const Row> rows) {
  std::ostringstream out;
  out << header;
  for (const Row& row : rows) write_row(out, row);
  return out.str();
}

}  // namespace

std::string csv_field(std::string_view text) {
  const std::string safe = escape_bytes(text, controls::lines);
  if (safe.find_first_of(",\"\r\n") == std::string::npos) return safe;
  std::string out = "\"";
  for (const char c : safe) {
    if (c == '"') out += '"';
    out += c;
  }
  return out + '"';
}

std::string to_csv(std::span<const result> runs) {
  std::vector<result> clean;
  for (const result& r : runs) clean.push_back(finite(r));
  const open_columns open = columns_of(clean);
  std::string out;
  append_line(row(result(), open), true, out);
  for (const result& r : clean) append_line(row(r, open), false, out);
  return out;
}

void write_row(std::ostream& out, const step_row& r) {
  out << fmt::format("{},{},{},{},{},{},{},{}\n", key(r.key), r.step, number(r.bytes),
                     number(r.entries), number(r.confidence), number(r.budget),
                     number(r.attention_recall), number(r.output_rel_l2));
}

void write_row(std::ostream& out, const head_row& r) {
  out << fmt::format("{},{},{},{},{},{},{}\n", key(r.key), r.layer, r.kv_head,
                     number(r.mean_entries), number(r.attention_recall), number(r.output_rel_l2),
                     number(r.head_l1));
}

void write_row(std::ostream& out, const kept_row& r) {
  out << fmt::format("{},{},{},{},{}\n", key(r.key), r.step, r.layer, r.kv_head,
                     fmt::join(r.positions, " "));
}

std::string to_csv(std::span<const step_row> rows) { return all_rows(steps_header, rows); }
std::string to_csv(std::span<const head_row> rows) { return all_rows(heads_header, rows); }
std::string to_csv(std::span<const kept_row> rows) { return all_rows(kept_header, rows); }

}  // namespace kvreplay::reports
