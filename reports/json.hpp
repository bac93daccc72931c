// results.json, schema kvreplay.results/1: written and read back.
//
// Every key but `details` is always written; null is what was not measured. Never NaN or infinity:
// see finite(). Numbers are in a form that gives the same double back; `tokens`, `sequence`, `seed`
// and `threads` are integers. Texts (keys that come from traces too) are escaped by
// escape_bytes(controls::keep) of text.hpp, which the reader undoes. < > & and the line separators
// U+2028, U+2029 are written as \uNNNN, so that the file can stand inside an HTML page as it is.
#pragma once

#include <string>
#include <string_view>

#include "reports/result.hpp"

namespace kvreplay::reports {

inline constexpr std::string_view results_schema = "kvreplay.results/1";

// The whole file, indented by one space, ending in a newline. Parameter names of a row are
// distinct, and so are the names in quality.more, none of which is one of the fixed metrics'.
std::string to_json(const report& r);

// One row on one line, without a line end: what the journal holds.
std::string to_json_line(const result& r);

// Strict: schema and version as above, no unknown key but in `quality` (those become
// quality.more, in name order) and in `params` and `quality_ci`, no duplicate key, no other type,
// no number out of range, nothing after the end. Numbers and texts that are missing count as not
// measured and empty; `runs`, and in a row `trace`, `policy`, `mode` and `status`, must be there.
// Throws report_error naming `file` and the key.
report read_json(std::string_view text, const std::string& file);

// The inverse of to_json_line; `where` (file and line) opens the error.
result read_json_line(std::string_view text, const std::string& where);

}  // namespace kvreplay::reports
