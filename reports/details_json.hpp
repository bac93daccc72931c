// The key `details` of a row in results.json: written and read back.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "reports/details.hpp"

namespace kvreplay::reports::detail {

nlohmann::ordered_json details_to_json(const row_details& details);

// Strict: known keys, equal lengths, ascending steps, no more points, layers, heads or counts than
// a writer gives. Throws report_error; `where` opens its text.
row_details details_from_json(const nlohmann::ordered_json& value, const std::string& where);

}  // namespace kvreplay::reports::detail
