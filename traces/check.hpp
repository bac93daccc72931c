// check: every rule of FORMAT.md, o and lse recomputed in double from q, k, v included.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "traces/reader.hpp"

namespace kvreplay::traces {

struct check_options {
  bool all = false;               // every row, not a sample
  std::int64_t sample_rows = 64;  // per layer, spread over the sequence, first and last included
  std::function<void(double share_done)> progress = {};
};

struct check_finding {
  std::string text;  // one line naming dataset, layer, step, found, expected
};

struct check_report {
  std::int64_t rows_checked = 0, values_checked = 0;
  double max_lse_error = 0, max_o_error = 0;  // absolute; o relative to (1 + |o|)
  std::vector<check_finding> findings;        // at most 20 texts
  std::int64_t finding_count = 0;
  std::int64_t nonfinite_values = 0;
  bool ok() const { return finding_count == 0; }
};

check_report check(const reader& file, const check_options& options);

}  // namespace kvreplay::traces
