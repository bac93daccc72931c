// fidelity: how well open-loop scores order policies as the closed loop does.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "reports/result.hpp"

namespace kvreplay::reports {

// A pair of policies that the open-loop score orders against the closed loop: `worse` is worse in
// the closed loop, and the score takes it for the better one. Indices into fidelity::policies.
struct inversion {
  std::size_t worse = 0, better = 0;
};

// One open-loop score against one closed-loop metric over the policies of one text, or (trace
// empty) the mean over the texts. Intervals: 95 %, bootstrap over policies.
struct rank_agreement {
  std::string trace, open, closed;
  maybe spearman, kendall;
  std::pair<maybe, maybe> spearman_ci, kendall_ci;
  std::vector<inversion> inversions;  // of one text
};

struct fidelity {
  std::vector<std::string> policies, traces;
  std::vector<rank_agreement> agreements;
};

// Joins open and closed rows of the same trace, sequence and policy; `full` itself (KL exactly 0)
// is left out, as every score puts it first. Policies that lack a row in one of the texts are left
// out. Scores that a row lacks leave that agreement out. Throws report_error with fewer than three
// policies.
fidelity measure_fidelity(std::span<const result> rows);

// One line: Spearman with closed-loop KL of every open-loop score, the best first.
std::string fidelity_line(const fidelity& f);

std::string to_json(const fidelity& f, const tool_info& tool);

// The line of a file that to_json wrote. Throws report_error naming `path`.
std::string read_fidelity_line(const std::string& text, const std::string& path);

}  // namespace kvreplay::reports
