// output_files: results files of the commands, by the ending of their name.
#pragma once

#include <string>

#include "reports/result.hpp"

namespace kvreplay::replay {

// Throws usage_error for an ending that no format has.
void require_known_format(const std::string& path);

// Writes the report as what the ending says; an existing file stays until the new one is whole.
void write_report(const std::string& path, const reports::report& report);

}  // namespace kvreplay::replay
