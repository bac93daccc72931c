// Token ids from text files, and how many ids a tokenizer knows.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kvreplay::tracer {

// Decimal ids separated by white space. Throws model_error naming file and the first bad word.
std::vector<std::int32_t> read_token_file(const std::string& path);

// Largest id of directory/tokenizer.json (vocabulary and added tokens) plus one; nothing where
// there is no such file. Output heads are often padded to a multiple of 64 beyond it.
std::optional<std::int64_t> tokenizer_size(const std::string& directory);

}  // namespace kvreplay::tracer
