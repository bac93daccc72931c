// The table for a terminal. Units are scaled for the eye; CSV and JSON never do that.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reports/result.hpp"

namespace kvreplay::reports {

struct table_options {
  std::size_t width = 100;          // the policy column wraps to fit; numbers are never cut
  bool unicode = false;             // the rule under the header
  std::vector<std::string> labels;  // one per row: a short name; empty: the resolved policy
  std::vector<std::string> more;    // further columns by flattened name: "quality.kl_proxy"
  std::vector<std::string> footer;  // lines below: what the mode leaves out, "layers 4/30"
};

// Columns: policy, then trace, sequence and mode where the rows differ in them, precision, entries,
// bytes, ratio, recall, bound, output_rel_l2, residual_rel_l2, ppl, logit_kl, top1, and `more`. A
// column that no row fills is left out. Numbers have 4 significant digits. Below a failed row
// stands its note. Texts are escaped for a terminal. Every line ends in a line feed, none in a
// blank.
std::string to_table(std::span<const result> runs, const table_options& options = {});

// "name:key=value,...+modifier:key=value" of those parameters that are not as in `defaults` (a name
// that is not there counts as changed); a short label for to_table.
std::string short_policy(const result& r,
                         std::span<const std::pair<std::string, std::string>> defaults);

// 4 significant digits: 0.05000, 12.35, 123456, 1.235e-07; 0 is "0".
std::string four_digits(double value);

}  // namespace kvreplay::reports
