// What the page's scripts read: the rows by column, so that ten thousand stay a few megabytes.
#pragma once

#include <span>
#include <string>

#include "reports/result.hpp"

namespace kvreplay::reports::detail {

// One JSON object, without < > &, line separators and control characters:
//   count, labels [count], texts {name: {values, index [count]}}, numbers {"section.name": [count]}
//   of the columns that a row fills, intervals {metric: {low, high}}, details {row: ...} as in
//   results.json, files [{tool's fields, first, rows}]
std::string page_data(std::span<const report> reports, std::span<const std::string> labels);

// Replaces < > & and U+2028, U+2029 in a JSON text by \uNNNN: they stand inside strings only.
std::string safe_in_html(const std::string& json_text);

}  // namespace kvreplay::reports::detail
