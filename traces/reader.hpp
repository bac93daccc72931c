// Reading a kvtrace file. Strict: whatever breaks a rule of FORMAT.md is a trace_error, at open for
// the structure (types, ranks, extents, attributes, gaps) and at the read for the data (NaN,
// infinities, rows of zeros). Opened read-only, without a lock, from many processes at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "traces/schema.hpp"

namespace kvreplay::traces {

struct open_options {
  bool recover = false;    // accept complete = 0 and read up to `committed`
  bool check_data = true;  // false: reads do not look at values (check() counts faults itself)
};

// Rows [begin, end) of one layer, 16-bit data raw as in the file (no conversion), o widened to
// float where the file has float16. Absent datasets give empty vectors. q, o and lse start at
// max(begin, first_row).
struct layer_slice {
  int sequence = 0, layer = 0;
  std::int64_t begin = 0, end = 0;
  std::int64_t row_begin = 0;        // position of q's, o's and lse's first row here
  std::vector<half_bits> q;          // [end - row_begin, n_q_heads, head_dim]
  std::vector<half_bits> k;          // [end - begin, n_kv_heads, head_dim]
  std::vector<half_bits> v;          // [end - begin, n_kv_heads, value_dim]
  std::vector<float> o;              // [end - row_begin, n_q_heads, value_dim]
  std::vector<float> lse;            // [end - row_begin, n_q_heads]
  std::vector<float> value_norm;     // [end - begin, n_q_heads]
  std::vector<float> residual_norm;  // [end - begin]
  std::vector<float> retention;      // [end - begin, n_kv_heads]
  std::vector<float> image_score;    // [end - begin]
};

// Safe to use from several threads: HDF5 calls are serialised inside.
class reader {
 public:
  explicit reader(const std::string& path, open_options options = {});
  ~reader();
  reader(reader&&) noexcept;
  reader& operator=(reader&&) noexcept;

  const std::string& path() const;
  bool complete() const;  // false only with recover
  std::string producer() const;
  std::string created() const;
  std::int64_t file_bytes() const;
  const model_info& model() const;
  const std::vector<sequence_info>& sequences() const;  // in numeric order
  const sequence_info& sequence(int id) const;
  const layer_info& layer(int sequence, int layer) const;
  // "sequences/<s>/layers/<l>" as spelled in the file, for messages.
  std::string layer_path(int sequence, int layer) const;
  // Hash over tokens, shapes and a sample of rows: the `fingerprint` attribute where present, else
  // computed in the same way. 16 hex digits.
  std::string fingerprint(int sequence) const;

  std::vector<std::int32_t> tokens(int sequence) const;
  // [R, 4]: entropy, margin, top, lse per row of logit_pos.
  std::vector<float> confidence(int sequence) const;
  // Rows [begin, end) of logits as float, [end - begin, logit_size], raw 16-bit widened by us.
  std::vector<float> logits(int sequence, std::int64_t begin, std::int64_t end) const;
  std::vector<float> residual_final(int sequence, std::int64_t begin, std::int64_t end) const;
  layer_slice read_layer(int sequence, int layer, std::int64_t begin, std::int64_t end) const;
  std::vector<float> column_sum(int sequence, int layer) const;  // [n_q_heads, P]
  // Recorded probability rows; positions in attn_pos, rows [n, n_q_heads, T].
  std::vector<std::int32_t> attention_positions(int sequence, int layer) const;
  std::vector<half_bits> attention_row(int sequence, int layer, std::int64_t row) const;
  std::vector<float> wo(int layer) const;  // [n_q_heads, value_dim, hidden_size]

 private:
  struct impl;
  std::unique_ptr<impl> impl_;
};

// Walks a sequence layer by layer in slices of at most `rows` positions: next() is false at the
// end.
class layer_cursor {
 public:
  layer_cursor(const reader& file, int sequence, std::int64_t rows);
  bool next(layer_slice& slice);

 private:
  const reader* file_;
  int sequence_;
  std::int64_t rows_, begin_ = 0;
  size_t index_ = 0;
};

}  // namespace kvreplay::traces
