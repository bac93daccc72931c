// Writing a kvtrace file so that a crash at any moment leaves either the finished file or a
// recoverable NAME.part, and never a file that looks complete and is not.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "traces/schema.hpp"

namespace kvreplay::traces {

// What a sequence will hold; extents are fixed at begin_sequence.
struct sequence_plan {
  std::int64_t n_prompt = 0, n_tokens = 0;
  std::int64_t first_row = 0;  // of q, o, lse (--rows decode); <= n_prompt - 1
  std::string name, task, source = "real";
  std::optional<double> temperature;
  std::optional<std::int64_t> seed;
  std::vector<std::int32_t> logit_pos;  // rows of confidence / logits / residual_final
  bool logits = false;                  // float32
  bool confidence = false;
  bool residual_final = false;                     // float16 (cache_dtype float16) or float32
  bool q = true, kv = true, o = true, lse = true;  // without q, k, v: attention alone
  bool o_float16 = true;
  bool value_norm = false, residual_norm = false, retention = false, column_sum = false;
  bool image_score = false;
  std::vector<std::int32_t> attn_pos;  // probability rows to come; empty: none
  std::vector<std::pair<int, int>> chunks;
  std::map<std::string, std::vector<std::pair<int, int>>> spans;
};

// Projected size of the file in bytes.
std::int64_t projected_bytes(const model_info& model, const sequence_plan& plan);

// All spans are row-major with the shapes of FORMAT.md; `first` is a position (for k and v ...) or
// a row index (for logit rows). Every call checks extents. Errors (a full disk among them, which
// HDF5 reports at flush or close) are trace_error with the file's name.
class writer {
 public:
  // Opens path + ".part". An existing `path` stays until finish(). Throws when the folder cannot be
  // written. `producer` e.g. "kvreplay 0.1.0".
  writer(const std::string& path, const model_info& model, const std::string& producer);
  ~writer();  // without finish(): leaves NAME.part, readable with recover
  writer(const writer&) = delete;
  writer& operator=(const writer&) = delete;

  void put_wo(int layer, std::span<const float> wo, bool float16 = true);
  int begin_sequence(const sequence_plan& plan);  // -> its number, 0, 1, ...

  void put_tokens(std::int64_t first, std::span<const std::int32_t> tokens);
  void put_k(int layer, std::int64_t first, std::span<const half_bits> rows);
  void put_v(int layer, std::int64_t first, std::span<const half_bits> rows);
  void put_q(int layer, std::int64_t first, std::span<const half_bits> rows);
  void put_o(int layer, std::int64_t first,
             std::span<const float> rows);  // narrowed by us if float16
  void put_lse(int layer, std::int64_t first, std::span<const float> rows);
  void put_value_norm(int layer, std::int64_t first, std::span<const float> rows);
  void put_residual_norm(int layer, std::int64_t first, std::span<const float> rows);
  void put_image_score(int layer, std::int64_t first, std::span<const float> rows);
  void put_retention(int layer, std::int64_t first, std::span<const float> rows);
  void put_column_sum(int layer, std::span<const float> sums);
  void put_attention(int layer, std::int64_t row, std::span<const half_bits> probabilities);
  void put_confidence(std::int64_t first_row, std::span<const float> rows);
  void put_logits(std::int64_t first_row, std::span<const float> rows);
  void put_residual_final(std::int64_t first_row, std::span<const float> rows);

  // Positions [0, n) are whole in every dataset: flushes, then writes `committed`, then flushes.
  void commit(std::int64_t n);
  // Ends the sequence begun last (committed = n_tokens, fingerprint).
  void end_sequence();
  // complete = 1, close, fsync, rename to `path`, fsync of the folder.
  void finish();

 private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

}  // namespace kvreplay::traces
