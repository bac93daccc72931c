#include "traces/fingerprint.hpp"

#include <fmt/format.h>

#include <string_view>

namespace kvreplay::traces {

namespace {
constexpr std::uint64_t fnv_offset = 0xcbf29ce484222325u, fnv_prime = 0x100000001b3u;
}

fingerprint_hash::fingerprint_hash(const model_info& model, std::int64_t n_prompt,
                                   std::int64_t n_tokens)
    : state_(fnv_offset) {
  for (const char c : std::string_view("kvtrace/1")) add_bytes(static_cast<unsigned char>(c), 1);
  for (const std::int64_t value : {n_prompt, n_tokens, std::int64_t{model.n_layers},
                                   std::int64_t{model.n_q_heads}, std::int64_t{model.n_kv_heads},
                                   std::int64_t{model.head_dim}, std::int64_t{model.value_dim}}) {
    add_bytes(static_cast<std::uint64_t>(value), 8);
  }
}

void fingerprint_hash::add(std::span<const std::int32_t> tokens) {
  for (const std::int32_t token : tokens) add_bytes(static_cast<std::uint32_t>(token), 4);
}

void fingerprint_hash::add(std::span<const half_bits> row) {
  for (const half_bits value : row) add_bytes(value, 2);
}

std::string fingerprint_hash::hex() const { return fmt::format("{:016x}", state_); }

void fingerprint_hash::add_bytes(std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) {
    state_ = (state_ ^ (value >> (8 * i) & 0xffu)) * fnv_prime;
  }
}

std::vector<std::int64_t> sampled_rows(std::int64_t n) {
  std::vector<std::int64_t> rows;
  for (std::int64_t i = 0; i < 16 && n > 0; ++i) {
    const std::int64_t row = i * (n - 1) / 15;
    if (rows.empty() || rows.back() != row) rows.push_back(row);
  }
  return rows;
}

}  // namespace kvreplay::traces
