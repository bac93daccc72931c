// The `fingerprint` of a sequence: FNV-1a, 64 bits, over
//   "kvtrace/1", then as 64-bit little-endian integers n_prompt, n_tokens, n_layers, n_q_heads,
//   n_kv_heads, head_dim, value_dim, then the tokens as int32, then for every recorded layer in
//   ascending order and every sampled position the raw k row and the raw v row (for a layer without
//   k and v: the raw attention rows sampled in the same way).
// Sampled are i * (n - 1) / 15, i = 0 .. 15, each once. Written as 16 hex digits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "traces/schema.hpp"

namespace kvreplay::traces {

class fingerprint_hash {
 public:
  fingerprint_hash(const model_info& model, std::int64_t n_prompt, std::int64_t n_tokens);
  void add(std::span<const std::int32_t> tokens);
  void add(std::span<const half_bits> row);
  std::string hex() const;

 private:
  void add_bytes(std::uint64_t value, int bytes);
  std::uint64_t state_;
};

std::vector<std::int64_t> sampled_rows(std::int64_t n);

}  // namespace kvreplay::traces
