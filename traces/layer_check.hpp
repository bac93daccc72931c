// check of one layer of one sequence. Internal to traces/.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "traces/attention_row.hpp"
#include "traces/check.hpp"
#include "traces/data_rules.hpp"

namespace kvreplay::traces {

// Collects what check finds: counts everything, keeps the first 20 texts.
class check_log {
 public:
  explicit check_log(check_report& report) : report_(report) {}
  void add(const data_fault& fault);
  check_report& report() { return report_; }

 private:
  check_report& report_;
};

class layer_check {
 public:
  layer_check(const reader& file, int sequence, int layer, const check_options& options,
              check_log& log);
  void run();

 private:
  struct row_outcome {
    double lse_error = 0, o_error = 0;
    std::vector<std::string> faults;
  };

  void choose_rows();
  bool check_values(const layer_slice& slice);
  void check_slice_rows(const layer_slice& slice);
  row_outcome check_row(const layer_slice& slice, std::int64_t t) const;
  void compare_row(const layer_slice& slice, std::int64_t t, int head,
                   const attention_result& expected, row_outcome& outcome) const;
  void compare_attention(std::int64_t t, int head, const half_bits* row,
                         const attention_result& expected, row_outcome& outcome) const;
  void check_attention_rows();
  void check_attention_sums(std::int64_t t, const std::vector<half_bits>& row);
  void check_value_norms(const layer_slice& slice);
  void check_column_sums();
  void compare_column_sums(const std::vector<float>& found);
  std::string at(const char* dataset, std::int64_t step) const;

  const reader& file_;
  const model_info& model_;
  const sequence_info& info_;
  const layer_info& layer_;
  int sequence_, number_;
  const check_options& options_;
  check_log& log_;
  std::string where_;
  bool recompute_ = false, exact_ = false;  // exact_: attention met q, k, v exactly as stored
  wide_cache cache_;
  std::vector<std::int64_t> rows_;       // to recompute, ascending
  std::vector<std::int64_t> attn_rows_;  // of attn_pos, to check
  std::vector<std::int32_t> attn_pos_;
  std::vector<float> wo_;
  std::vector<double> wo_norm_;  // [n_q_heads, value_dim]: sum over j of |wo|
};

}  // namespace kvreplay::traces
