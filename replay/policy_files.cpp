#include "replay/policy_files.hpp"

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "reports/csv.hpp"
#include "traces/schema.hpp"

namespace kvreplay::replay {
namespace {

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw traces::trace_error(fmt::format("{}: {}", path, what));
}

std::string read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(path, "cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || !text) refuse(path, "cannot be read");
  return text.str();
}

// RFC 4180: one record after the other; false at the end of the text.
bool next_record(const std::string& text, size_t& at, std::vector<std::string>& fields) {
  if (at >= text.size()) return false;
  fields.assign(1, "");
  bool quoted = false;
  for (; at < text.size(); ++at) {
    const char c = text[at];
    if (quoted && c == '"' && at + 1 < text.size() && text[at + 1] == '"') {
      fields.back() += text[++at];
    } else if (c == '"') {
      quoted = !quoted;
    } else if (!quoted && c == ',') {
      fields.emplace_back();
    } else if (!quoted && c == '\n') {
      ++at;
      break;
    } else if (quoted || c != '\r') {
      fields.back() += c;
    }
  }
  return true;
}

template <class T>
T number(const std::string& path, std::int64_t line, std::string_view text) {
  T value{};
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || stop != text.data() + text.size() || value < 0) {
    refuse(path, fmt::format("record {}: '{}' is not a whole number >= 0", line, text));
  }
  return value;
}

std::vector<std::int32_t> position_list(const std::string& path, std::int64_t line,
                                        std::string_view text) {
  std::vector<std::int32_t> out;
  while (!text.empty()) {
    const size_t end = std::min(text.find(' '), text.size());
    out.push_back(number<std::int32_t>(path, line, text.substr(0, end)));
    if (out.size() > 1 && out[out.size() - 2] >= out.back()) {
      refuse(path, fmt::format("record {}: positions do not ascend at {}", line, out.back()));
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

}  // namespace

std::vector<double> read_head_table(const std::string& path, int n_layers, int q_heads,
                                    int kv_heads) {
  const auto table = nlohmann::json::parse(read_text(path), nullptr, false);
  if (table.is_discarded() || !table.is_object() || !table.contains("scores") ||
      table.value("schema", "") != "kvreplay.headscores/1") {
    refuse(path, "not a table of head scores: expected schema kvreplay.headscores/1 and scores");
  }
  const auto& layers = table["scores"];
  if (!layers.is_array() || layers.size() != static_cast<size_t>(n_layers)) {
    refuse(path, fmt::format("scores of {} layers, the model has {}", layers.size(), n_layers));
  }
  std::vector<double> shares(static_cast<size_t>(n_layers) * static_cast<size_t>(kv_heads), 0.0);
  double sum = 0;
  for (size_t l = 0; l < layers.size(); ++l) {
    if (!layers[l].is_array() || layers[l].size() != static_cast<size_t>(q_heads)) {
      refuse(path, fmt::format("layer {}: expected the scores of {} query heads", l, q_heads));
    }
    for (size_t h = 0; h < layers[l].size(); ++h) {
      const auto& score = layers[l][h];
      const double value = score.is_number() ? score.get<double>() : -1;
      if (!(value >= 0) || !std::isfinite(value)) {
        refuse(path, fmt::format("layer {}, query head {}: expected a number >= 0", l, h));
      }
      shares[l * static_cast<size_t>(kv_heads) + h / static_cast<size_t>(q_heads / kv_heads)] +=
          value;
      sum += value;
    }
  }
  if (!(sum > 0)) refuse(path, "all scores are 0");
  for (double& share : shares) share /= sum;
  return shares;
}

policies::kept_sets read_kept_sets(const std::string& path, int sequence) {
  const std::string text = read_text(path);
  policies::kept_sets sets;
  sets.file = path;
  size_t at = 0;
  std::vector<std::string> fields;
  const std::string header(reports::kept_header);
  if (text.compare(0, header.size(), header) != 0) {
    refuse(path, fmt::format("expected the first line '{}'", header.substr(0, header.size() - 1)));
  }
  next_record(text, at, fields);
  std::string policy;
  for (std::int64_t line = 2; next_record(text, at, fields); ++line) {
    if (fields.size() != 8) {
      refuse(path, fmt::format("record {}: {} fields, expected 8", line, fields.size()));
    }
    if (number<int>(path, line, fields[3]) != sequence) continue;
    if (sets.held.empty()) policy = fields[1];
    if (fields[1] != policy) {
      refuse(path, fmt::format("record {}: policy '{}' after '{}'; expected the sets of one policy",
                               line, fields[1], policy));
    }
    const auto step = number<std::int64_t>(path, line, fields[4]);
    const auto layer = number<int>(path, line, fields[5]),
               head = number<int>(path, line, fields[6]);
    if (!sets.held.emplace(std::tuple(step, layer, head), position_list(path, line, fields[7]))
             .second) {
      refuse(path, fmt::format("record {}: step {}, layer {}, KV head {} is there twice", line,
                               step, layer, head));
    }
  }
  if (sets.held.empty()) refuse(path, fmt::format("no sets of sequence {}", sequence));
  return sets;
}

policies::policy with_files(const policies::policy& policy, int n_layers, int q_heads, int kv_heads,
                            int sequence) {
  policies::policy out = policy;
  auto& division = out.budget.division;
  if (division.kind == policies::division_kind::table) {
    division.shares = read_head_table(division.file, n_layers, q_heads, kv_heads);
  }
  if (!out.kept_file.empty()) {
    out.kept = std::make_shared<const policies::kept_sets>(read_kept_sets(out.kept_file, sequence));
  }
  return out;
}

}  // namespace kvreplay::replay
