#include "replay/row_lines.hpp"

#include <sstream>

#include "replay/ranks.hpp"
#include "reports/json.hpp"

namespace kvreplay::replay {

std::string to_lines(std::span<const reports::result> rows) {
  std::string out;
  for (const auto& row : rows) {
    out += reports::to_json_line(row);
    out += '\n';
  }
  return out;
}

std::vector<reports::result> from_lines(const std::string& lines) {
  std::vector<reports::result> out;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) {
    out.push_back(reports::read_json_line(line, "a row of another rank"));
  }
  return out;
}

std::vector<reports::result> broadcast_rows(std::span<const reports::result> rows) {
  return from_lines(broadcast(this_rank().rank == 0 ? to_lines(rows) : std::string{}));
}

}  // namespace kvreplay::replay
