#include "tracer/config_section.hpp"

#include <fmt/format.h>

#include <cmath>

#include "tracer/config.hpp"
#include "tracer/json_file.hpp"

namespace kvreplay::tracer {

using nlohmann::json;

void section::complain(const std::string& text) const { throw model_error(where_ + ": " + text); }

const json* section::find(const std::string& key) const {
  const auto found = values_.find(key);
  return found == values_.end() || found->is_null() ? nullptr : &*found;
}

std::optional<std::int64_t> section::integer(const std::string& key, std::int64_t low,
                                             std::int64_t high) const {
  const json* value = find(key);
  if (value == nullptr) return std::nullopt;
  const bool fits = value->is_number_integer() &&
                    !(value->is_number_unsigned() && value->get<std::uint64_t>() > INT64_MAX) &&
                    value->get<std::int64_t>() >= low && value->get<std::int64_t>() <= high;
  if (!fits) {
    complain(fmt::format("{} is {}, expected an integer {} .. {}", key, shown(*value), low, high));
  }
  return value->get<std::int64_t>();
}

int section::size(const std::string& key, std::int64_t high) const {
  const auto value = integer(key, 1, high);
  if (!value) complain(key + " is missing");
  return static_cast<int>(*value);
}

double section::positive(const std::string& key, std::optional<double> fallback) const {
  const json* value = find(key);
  if (value == nullptr) {
    if (!fallback) complain(key + " is missing");
    return *fallback;
  }
  if (!value->is_number() || !std::isfinite(value->get<double>()) || value->get<double>() <= 0) {
    complain(fmt::format("{} is {}, expected a number above 0", key, shown(*value)));
  }
  return value->get<double>();
}

bool section::flag(const std::string& key, bool fallback) const {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) {
    complain(fmt::format("{} is {}, expected true or false", key, shown(*value)));
  }
  return value->get<bool>();
}

std::string section::text(const std::string& key, const std::string& fallback) const {
  const json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_string()) {
    complain(fmt::format("{} is {}, expected a string", key, shown(*value)));
  }
  return value->get<std::string>();
}

std::string section::shown(const json& value) { return in_quotes(value.dump()); }

}  // namespace kvreplay::tracer
