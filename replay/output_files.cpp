#include "replay/output_files.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "replay/commands.hpp"
#include "reports/atomic_file.hpp"
#include "reports/csv.hpp"
#include "reports/json.hpp"

namespace kvreplay::replay {
namespace {

enum class output_format { json, csv };

output_format format_of(const std::string& path) {
  const auto extension = std::filesystem::path(path).extension();
  if (extension == ".json") return output_format::json;
  if (extension == ".csv") return output_format::csv;
  throw usage_error(fmt::format("-o {}: the ending decides the format; known: .json, .csv", path));
}

}  // namespace

void require_known_format(const std::string& path) { format_of(path); }

void write_report(const std::string& path, const reports::report& report) {
  reports::write_atomic(path, format_of(path) == output_format::json
                                  ? reports::to_json(report)
                                  : reports::to_csv(report.runs));
}

}  // namespace kvreplay::replay
