#include "reports/details_json.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "reports/result.hpp"
#include "reports/text.hpp"

namespace kvreplay::reports::detail {
namespace {

using json = nlohmann::ordered_json;

constexpr std::array series_names = {"bytes", "full_bytes", "confidence", "budget"};
constexpr std::size_t most_heads = std::size_t{1} << 20;  // layers * kv_heads

[[noreturn]] void fail(const std::string& where, const std::string& what) {
  throw report_error(escape_bytes(where + ": " + what, controls::none));
}

void require_object(const json& value, const std::string& where,
                    std::initializer_list<const char*> keys) {
  if (!value.is_object()) fail(where, fmt::format("is {}, expected an object", value.type_name()));
  for (const auto& [key, ignored] : value.items()) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      fail(where + "." + key, "is not a key of this schema");
    }
  }
}

const json& list_at(const json& object, const char* key, const std::string& where,
                    std::size_t most) {
  const auto found = object.find(key);
  if (found == object.end()) fail(fmt::format("{}.{}", where, key), "is missing");
  if (!found->is_array() || found->size() > most) {
    fail(fmt::format("{}.{}", where, key), fmt::format("is not a list of at most {}", most));
  }
  return *found;
}

// Whole numbers from 0 to `most`.
template <typename Integer>
std::vector<Integer> integers(const json& object, const char* key, const std::string& where,
                              std::size_t count, std::int64_t most) {
  std::vector<Integer> out;
  for (const auto& value : list_at(object, key, where, count)) {
    const bool fits = value.is_number_unsigned() &&
                      value.get<std::uint64_t>() <= static_cast<std::uint64_t>(most);
    if (!fits) {
      fail(fmt::format("{}.{}[{}]", where, key, out.size()),
           fmt::format("is not a whole number from 0 to {}", most));
    }
    out.push_back(static_cast<Integer>(value.get<std::uint64_t>()));
  }
  return out;
}

template <typename Integer>
void require_ascending(const std::vector<Integer>& values, const std::string& where) {
  for (std::size_t i = 1; i < values.size(); ++i) {
    if (values[i] <= values[i - 1]) fail(where, fmt::format("does not ascend at [{}]", i));
  }
}

point_series read_series(const json& value, const std::string& where) {
  require_object(value, where, {"step", "value"});
  point_series out;
  out.step = integers<std::int64_t>(value, "step", where, max_series_points, std::int64_t{1} << 53);
  require_ascending(out.step, where + ".step");
  for (const auto& number : list_at(value, "value", where, max_series_points)) {
    if (!number.is_number()) {
      fail(fmt::format("{}.value[{}]", where, out.value.size()),
           fmt::format("is {}, expected a number", number.type_name()));
    }
    out.value.push_back(number.get<double>());
  }
  if (out.step.size() != out.value.size()) {
    fail(where, fmt::format("has {} steps and {} values", out.step.size(), out.value.size()));
  }
  return out;
}

std::vector<std::optional<double>> read_cells(const json& value, const char* key,
                                              const std::string& where, std::size_t count) {
  std::vector<std::optional<double>> out;
  for (const auto& number : list_at(value, key, where, count)) {
    if (!number.is_number() && !number.is_null()) {
      fail(fmt::format("{}.{}[{}]", where, key, out.size()),
           fmt::format("is {}, expected a number or null", number.type_name()));
    }
    out.push_back(number.is_null() ? std::nullopt : std::optional(number.get<double>()));
  }
  if (out.size() != count) {
    fail(fmt::format("{}.{}", where, key),
         fmt::format("has {} numbers, expected layers x kv_heads = {}", out.size(), count));
  }
  return out;
}

head_map read_heads(const json& value, const std::string& where) {
  require_object(value, where,
                 {"layers", "kv_heads", "entries", "attention_recall", "output_rel_l2"});
  head_map out;
  out.layers = integers<int>(value, "layers", where, most_heads, 1 << 20);
  require_ascending(out.layers, where + ".layers");
  const auto heads = value.find("kv_heads");
  const bool fits = heads != value.end() && heads->is_number_unsigned() &&
                    heads->get<std::uint64_t>() >= 1 && heads->get<std::uint64_t>() <= most_heads;
  if (!fits) fail(where + ".kv_heads", fmt::format("is not a number from 1 to {}", most_heads));
  out.kv_heads = heads->get<int>();
  const std::size_t count = out.layers.size() * static_cast<std::size_t>(out.kv_heads);
  if (count > most_heads) fail(where, fmt::format("has more than {} heads", most_heads));
  out.entries = read_cells(value, "entries", where, count);
  out.attention_recall = read_cells(value, "attention_recall", where, count);
  out.output_rel_l2 = read_cells(value, "output_rel_l2", where, count);
  return out;
}

json cells(const std::vector<std::optional<double>>& values) {
  json out = json::array();
  for (const auto& value : values) {
    out.push_back(value && std::isfinite(*value) ? json(*value) : json(nullptr));
  }
  return out;
}

// What is whole is written as whole, without ".0".
json points(const std::vector<double>& values) {
  json out = json::array();
  for (const double value : values) {
    const bool whole = std::abs(value) < 9007199254740992.0 && value == std::floor(value);
    out.push_back(whole ? json(static_cast<std::int64_t>(value)) : json(value));
  }
  return out;
}

}  // namespace

json details_to_json(const row_details& details) {
  json out = json::object();
  for (const auto& [name, series] : details.series) {
    out["series"][name] = {{"step", series.step}, {"value", points(series.value)}};
  }
  if (!details.confidence_histogram.empty()) {
    out["confidence_histogram"] = details.confidence_histogram;
  }
  if (const auto& heads = details.heads) {
    out["heads"] = {{"layers", heads->layers},
                    {"kv_heads", heads->kv_heads},
                    {"entries", cells(heads->entries)},
                    {"attention_recall", cells(heads->attention_recall)},
                    {"output_rel_l2", cells(heads->output_rel_l2)}};
  }
  if (!details.needle.empty()) out["needle"] = details.needle;
  return out;
}

row_details details_from_json(const json& value, const std::string& where) {
  require_object(value, where, {"series", "confidence_histogram", "heads", "needle"});
  row_details out;
  if (const auto all = value.find("series"); all != value.end()) {
    const std::string path = where + ".series";
    require_object(*all, path,
                   {series_names[0], series_names[1], series_names[2], series_names[3]});
    for (const auto& [name, series] : all->items()) {
      out.series[name] = read_series(series, fmt::format("{}.{}", path, name));
    }
  }
  constexpr std::int64_t most_steps = std::int64_t{1} << 53;
  if (value.contains("confidence_histogram")) {
    out.confidence_histogram =
        integers<std::int64_t>(value, "confidence_histogram", where, confidence_bins, most_steps);
    if (out.confidence_histogram.size() != confidence_bins) {
      fail(where + ".confidence_histogram",
           fmt::format("has {} counts, expected {}", out.confidence_histogram.size(),
                       confidence_bins));
    }
  }
  if (const auto heads = value.find("heads"); heads != value.end()) {
    out.heads = read_heads(*heads, where + ".heads");
  }
  if (value.contains("needle")) {
    out.needle = integers<std::int64_t>(value, "needle", where, 2, most_steps);
    if (out.needle.size() != 2 || out.needle[0] >= out.needle[1]) {
      fail(where + ".needle", "is not [begin, end)");
    }
  }
  return out;
}

}  // namespace kvreplay::reports::detail
