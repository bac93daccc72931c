// One object of config.json, read with complaints that name the file and the key.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace kvreplay::tracer {

// A null value counts as absent, as transformers has it.
class section {
 public:
  section(const nlohmann::json& values, std::string where)
      : values_(values), where_(std::move(where)) {}

  [[noreturn]] void complain(const std::string& text) const;
  const nlohmann::json* find(const std::string& key) const;
  std::optional<std::int64_t> integer(const std::string& key, std::int64_t low,
                                      std::int64_t high) const;
  int size(const std::string& key, std::int64_t high) const;  // at least 1, must be there
  double positive(const std::string& key, std::optional<double> fallback) const;
  bool flag(const std::string& key, bool fallback) const;
  std::string text(const std::string& key, const std::string& fallback) const;

  static std::string shown(const nlohmann::json& value);
  const std::string& where() const { return where_; }

 private:
  const nlohmann::json& values_;
  std::string where_;
};

}  // namespace kvreplay::tracer
