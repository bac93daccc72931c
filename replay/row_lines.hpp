// row_lines: rows as they travel between ranks, a line of JSON each.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "reports/result.hpp"

namespace kvreplay::replay {

std::string to_lines(std::span<const reports::result> rows);
std::vector<reports::result> from_lines(const std::string& lines);

// Rank 0's rows, on every rank.
std::vector<reports::result> broadcast_rows(std::span<const reports::result> rows);

}  // namespace kvreplay::replay
