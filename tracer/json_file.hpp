// Strict JSON for files from others, and names from such files made fit for a one-line message.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace kvreplay::tracer {

// `name` in quotes, control characters as \xNN, cut after 120 bytes.
std::string in_quotes(std::string_view name);

// Parses `text`, refusing repeated keys and nesting beyond `max_depth`. Throws model_error with a
// line that begins with `where`.
nlohmann::json parse_json(const std::string& text, const std::string& where, int max_depth);

// The same for a whole file of at most max_bytes.
nlohmann::json read_json(const std::string& path, std::uint64_t max_bytes, int max_depth);

}  // namespace kvreplay::tracer
