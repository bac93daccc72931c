#include <fmt/format.h>

#include <filesystem>
#include <vector>

#include "replay/commands.hpp"
#include "replay/output_files.hpp"
#include "reports/atomic_file.hpp"
#include "reports/json.hpp"

namespace kvreplay::replay {

int run_report(const report_command& command) {
  if (std::filesystem::path(command.output).extension() != ".html") {
    throw usage_error(fmt::format("-o {}: expected a name that ends in .html", command.output));
  }
  require_known_format(command.output);
  reports::probe_writable(command.output);
  std::vector<reports::report> reports;
  for (const auto& path : command.results) {
    reports.push_back(reports::read_json(reports::read_file(path), path));
  }
  write_page(command.output, reports);
  size_t rows = 0;
  for (const auto& report : reports) rows += report.runs.size();
  fmt::print("{}: {} rows, {} KiB\n", command.output, rows,
             (std::filesystem::file_size(command.output) + 1023) / 1024);
  return exit_ok;
}

}  // namespace kvreplay::replay
