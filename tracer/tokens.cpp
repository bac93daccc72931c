#include "tracer/tokens.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>

#include "tracer/config.hpp"
#include "tracer/json_file.hpp"

namespace kvreplay::tracer {
namespace {

constexpr std::string_view white_space = " \t\r\n\v\f";

std::int32_t parse_id(std::string_view word, const std::string& path, size_t index) {
  const auto complain = [&](std::string_view reason) {
    throw model_error(fmt::format("{}: word {}: {} {}", path, index, in_quotes(word), reason));
  };
  std::int32_t id = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
  if (error == std::errc::result_out_of_range) complain("does not fit a 32-bit token id");
  if (error != std::errc() || end != word.data() + word.size()) {
    complain("is not a number; expected decimal token ids separated by white space");
  }
  if (id < 0) complain("is negative; token ids count from 0");
  return id;
}

std::int64_t id_of(const nlohmann::json& value, const std::string& path) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT32_MAX) {
    throw model_error(fmt::format("{}: a token id is {}, expected a number from 0 to 2^31 - 1",
                                  path, in_quotes(value.dump().substr(0, 40))));
  }
  return value.get<std::int64_t>();
}

// "model.vocab" is a map from token to id, or for unigram models a list in the order of ids.
std::int64_t vocabulary_size(const nlohmann::json& vocabulary, const std::string& path) {
  if (vocabulary.is_array()) return static_cast<std::int64_t>(vocabulary.size());
  if (!vocabulary.is_object()) {
    throw model_error(fmt::format("{}: model.vocab is neither a map nor a list", path));
  }
  std::int64_t size = 0;
  for (const auto& item : vocabulary.items()) {
    size = std::max(size, id_of(item.value(), path) + 1);
  }
  return size;
}

}  // namespace

std::vector<std::int32_t> read_token_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw model_error(fmt::format("{}: token file cannot be read", path));
  const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  if (in.bad()) throw model_error(fmt::format("{}: token file cannot be read", path));
  std::vector<std::int32_t> ids;
  const std::string_view view = text;
  size_t begin = view.find_first_not_of(white_space);
  while (begin != std::string_view::npos) {
    const size_t end = std::min(view.find_first_of(white_space, begin), view.size());
    ids.push_back(parse_id(view.substr(begin, end - begin), path, ids.size()));
    begin = view.find_first_not_of(white_space, end);
  }
  if (ids.empty()) throw model_error(fmt::format("{}: no token ids in the file", path));
  return ids;
}

std::optional<std::int64_t> tokenizer_size(const std::string& directory) {
  const std::string path = (std::filesystem::path(directory) / "tokenizer.json").string();
  if (!std::filesystem::exists(path)) return std::nullopt;
  const nlohmann::json root = read_json(path, std::uint64_t{1} << 28, 32);
  const nlohmann::json::json_pointer vocabulary("/model/vocab");
  if (!root.is_object() || !root.contains(vocabulary)) {
    throw model_error(fmt::format("{}: no model.vocab in the file", path));
  }
  std::int64_t size = vocabulary_size(root.at(vocabulary), path);
  if (const auto added = root.find("added_tokens"); added != root.end() && added->is_array()) {
    for (const auto& token : *added) {
      if (token.is_object() && token.contains("id")) {
        size = std::max(size, id_of(token.at("id"), path) + 1);
      }
    }
  }
  return size;
}

}  // namespace kvreplay::tracer
