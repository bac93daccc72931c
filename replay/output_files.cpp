#include "replay/output_files.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "replay/commands.hpp"
#include "replay/labels.hpp"
#include "reports/atomic_file.hpp"
#include "reports/csv.hpp"
#include "reports/html.hpp"
#include "reports/json.hpp"

namespace kvreplay::replay {
namespace {

enum class output_format { json, csv, html };

output_format format_of(const std::string& path) {
  const auto extension = std::filesystem::path(path).extension();
  if (extension == ".json") return output_format::json;
  if (extension == ".csv") return output_format::csv;
  if (extension == ".html") return output_format::html;
  throw usage_error(
      fmt::format("-o {}: the ending decides the format; known: .json, .csv, .html", path));
}

}  // namespace

void require_known_format(const std::string& path) {
  if (format_of(path) != output_format::html) return;
  if (const auto why = reports::page_unavailable(); !why.empty()) {
    throw reports::report_error(fmt::format("-o {}: {}", path, why));
  }
}

bool wants_details(std::span<const std::string> paths) {
  return std::any_of(paths.begin(), paths.end(),
                     [](const auto& path) { return format_of(path) != output_format::csv; });
}

void write_report(const std::string& path, const reports::report& report) {
  switch (format_of(path)) {
    case output_format::json: {
      reports::report kept = report;
      reports::trim_details(kept.runs);
      return reports::write_atomic(path, reports::to_json(kept));
    }
    case output_format::csv:
      return reports::write_atomic(path, reports::to_csv(report.runs));
    case output_format::html:
      return write_page(path, {&report, 1});
  }
}

void write_page(const std::string& path, std::span<const reports::report> reports) {
  std::vector<std::string> labels;
  for (const auto& report : reports) {
    const auto some = labels_of(report.runs);
    labels.insert(labels.end(), some.begin(), some.end());
  }
  reports::write_atomic(path, reports::to_html(reports, labels));
}

}  // namespace kvreplay::replay
