// The report as one HTML file: table, charts, provenance. It needs no network and no server; the
// charting library and its licence are inside. docs/REPORT.md explains the page.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "reports/result.hpp"

namespace kvreplay::reports {

// Why this build can write no page, with what to install; empty where it can.
std::string_view page_unavailable();

// The page. `labels`: a short name per row, over all reports in their order (as many as rows).
// Names are data: they stand in one JSON element, escaped, and reach the page as text only; scripts
// without the page's own nonce do not run. Numbers are rounded to 7 significant digits; details are
// kept as by trim_details. The same input gives the same bytes. Throws report_error where
// page_unavailable() says something.
std::string to_html(std::span<const report> reports, std::span<const std::string> labels);

}  // namespace kvreplay::reports
