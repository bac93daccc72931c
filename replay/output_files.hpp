// output_files: results files of the commands, by the ending of their name.
#pragma once

#include <span>
#include <string>

#include "reports/result.hpp"

namespace kvreplay::replay {

// Throws usage_error for an ending that no format has, report_error for one that this build cannot
// write.
void require_known_format(const std::string& path);

// Whether one of the files holds rows' details: what they are measured for.
bool wants_details(std::span<const std::string> paths);

// Writes the report as what the ending says; an existing file stays until the new one is whole.
// Details stay where trim_details of reports/ leaves them.
void write_report(const std::string& path, const reports::report& report);

// One page of several reports.
void write_page(const std::string& path, std::span<const reports::report> reports);

}  // namespace kvreplay::replay
