#include "tracer/json_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <vector>

#include "tracer/config.hpp"

namespace kvreplay::tracer {

using nlohmann::json;

std::string in_quotes(std::string_view name) {
  constexpr size_t longest = 120;
  std::string text = "'";
  for (const char c : name.substr(0, longest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      text += fmt::format("\\x{:02x}", byte);
    } else {
      text += c;
    }
  }
  return text + (name.size() > longest ? "...'" : "'");
}

json parse_json(const std::string& text, const std::string& where, int max_depth) {
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  const auto watch = [&](int depth, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      if (depth >= max_depth) {
        throw model_error(fmt::format("{}: JSON nested deeper than {} levels", where, max_depth));
      }
    }
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!keys.back().insert(key).second) {
        throw model_error(fmt::format("{}: key {} appears twice", where, in_quotes(key)));
      }
    }
    return true;
  };
  try {
    return json::parse(text, watch);
  } catch (const json::exception& e) {
    std::string reason = e.what();
    std::replace(reason.begin(), reason.end(), '\n', ' ');
    throw model_error(fmt::format("{}: not valid JSON: {}", where, reason));
  }
}

json read_json(const std::string& path, std::uint64_t max_bytes, int max_depth) {
  std::error_code error;
  const std::uint64_t size = std::filesystem::file_size(path, error);
  if (error) throw model_error(fmt::format("{}: {}", path, error.message()));
  if (size > max_bytes) {
    throw model_error(fmt::format("{}: {} bytes, expected at most {}", path, size, max_bytes));
  }
  std::string text(size, '\0');
  std::ifstream in(path, std::ios::binary);
  if (!in.read(text.data(), static_cast<std::streamsize>(size))) {
    throw model_error(fmt::format("{}: cannot be read", path));
  }
  return parse_json(text, path, max_depth);
}

}  // namespace kvreplay::tracer
