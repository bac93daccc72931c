#include "reports/html.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <set>

#include "reports/html_data.hpp"
#include "reports/page_parts.hpp"
#include "reports/text.hpp"

namespace kvreplay::reports {
namespace {

// FNV-1a over the data: whoever wrote a name into it cannot know the result beforehand.
std::string nonce_of(std::string_view data) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : data) {
    hash ^= static_cast<unsigned char>(c);
    hash *= 0x100000001b3U;
  }
  return fmt::format("kvreplay{:016x}", hash);
}

std::string escaped_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string title_of(std::span<const report> reports) {
  std::set<std::string> traces;
  std::size_t rows = 0;
  for (const report& r : reports) {
    rows += r.runs.size();
    for (const result& run : r.runs) traces.insert(run.trace.substr(run.trace.rfind('/') + 1));
  }
  const std::string where =
      traces.size() == 1 ? *traces.begin() : fmt::format("{} traces", traces.size());
  return fmt::format("kvreplay: {} row{} on {}", rows, rows == 1 ? "" : "s", where);
}

}  // namespace

std::string_view page_unavailable() {
  return detail::chart_js.empty()
             ? "this build has no charts: install libjs-chart.js (Debian) and build again"
             : "";
}

std::string to_html(std::span<const report> reports, std::span<const std::string> labels) {
  if (const auto why = page_unavailable(); !why.empty()) throw report_error(std::string(why));
  const std::string data = detail::page_data(reports, labels);
  const std::string nonce = nonce_of(data);
  const std::string title = escaped_text(escape_bytes(title_of(reports), controls::none));
  const std::string licence = escaped_text(detail::chart_licence);
  // One pass over the frame: what is put in is never searched for marks.
  const std::array<std::pair<std::string_view, std::string_view>, 7> marks = {{
      {"{{title}}", title},
      {"{{nonce}}", nonce},
      {"{{style}}", detail::page_css},
      {"{{data}}", data},
      {"{{chart.js}}", detail::chart_js},
      {"{{script}}", detail::page_js},
      {"{{licence}}", licence},
  }};
  std::string out;
  std::string_view rest = detail::page_html;
  while (true) {
    const std::size_t open = rest.find("{{");
    out += rest.substr(0, open);
    if (open == std::string_view::npos) return out;
    rest.remove_prefix(open);
    const auto mark = std::find_if(marks.begin(), marks.end(),
                                   [&](const auto& m) { return rest.starts_with(m.first); });
    if (mark == marks.end()) throw report_error("page.html has an unknown mark");
    out += mark->second;
    rest.remove_prefix(mark->first.size());
  }
}

}  // namespace kvreplay::reports
