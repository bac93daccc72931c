#include "reports/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "reports/text.hpp"

namespace kvreplay::reports {
namespace {

constexpr std::size_t gap = 2;         // blanks between columns
constexpr std::size_t min_label = 16;  // columns that the policy keeps on a narrow terminal

struct column {
  std::string title;
  std::vector<std::string> cells;
  bool right = true;
  std::size_t width() const {
    std::size_t w = display_width(title);
    for (const std::string& cell : cells) w = std::max(w, display_width(cell));
    return w;
  }
  bool empty() const {
    return std::all_of(cells.begin(), cells.end(), [](const auto& cell) { return cell.empty(); });
  }
};

std::string safe(std::string_view text) { return escape_bytes(text, controls::none); }

maybe number_at(const result& r, std::string_view flattened) {
  maybe out;
  for_each_number(r, [&](std::string_view section, std::string_view name, const maybe& value) {
    if (flattened == fmt::format("{}.{}", section, name)) out = value;
  });
  return out;
}

// Rates in bytes per second stand as GB/s.
column number_column(const std::string& title, const std::string& field,
                     std::span<const result> runs) {
  constexpr std::string_view rate = "_bytes_per_s";
  const bool scaled = title.ends_with(rate);
  column out{safe(scaled ? title.substr(0, title.size() - rate.size()) + " [GB/s]" : title), {}};
  for (const result& r : runs) {
    const maybe value = number_at(r, field);
    out.cells.push_back(value ? four_digits(scaled ? *value * 1e-9 : *value) : "");
  }
  return out;
}

// One unit for the whole column: the largest that leaves the largest value at 1 or above.
column bytes_column(std::span<const result> runs) {
  double largest = 0;
  for (const result& r : runs) largest = std::max(largest, r.memory.mean_bytes.value_or(0));
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  double scale = 1;
  while (unit + 1 < std::size(units) && largest >= scale * 1024) {
    scale *= 1024;
    ++unit;
  }
  column out{fmt::format("bytes [{}]", units[unit]), {}};
  for (const result& r : runs) {
    const maybe value = r.memory.mean_bytes;
    out.cells.push_back(value ? four_digits(*value / scale) : "");
  }
  return out;
}

template <typename Text>
void add_text_column(const char* title, std::span<const result> runs, bool always, Text text,
                     std::vector<column>& out) {
  column c{title, {}, false};
  for (const result& r : runs) c.cells.push_back(safe(text(r)));
  const bool differ = std::any_of(c.cells.begin(), c.cells.end(),
                                  [&](const auto& cell) { return cell != c.cells.front(); });
  if (always || differ) out.push_back(std::move(c));
}

std::vector<column> columns_of(std::span<const result> runs, const table_options& options) {
  std::vector<column> out;
  add_text_column(
      "trace", runs, false, [](const result& r) { return r.trace; }, out);
  add_text_column(
      "seq", runs, false, [](const result& r) { return std::to_string(r.sequence); }, out);
  add_text_column(
      "mode", runs, false, [](const result& r) { return r.mode; }, out);
  add_text_column(
      "precision", runs, true, [](const result& r) { return r.precision; }, out);
  out.push_back(number_column("entries", "memory.mean_entries", runs));
  out.push_back(bytes_column(runs));
  const std::pair<const char*, const char*> numbers[] = {
      {"ratio", "memory.memory_ratio"},
      {"recall", "quality.attention_recall"},
      {"bound", "quality.recall_bound"},
      {"output_rel_l2", "quality.output_rel_l2"},
      {"residual_rel_l2", "quality.residual_rel_l2"},
      {"ppl", "quality.ppl"},
      {"logit_kl", "quality.logit_kl"},
      {"top1", "quality.top1_agreement"}};
  for (const auto& [title, field] : numbers) out.push_back(number_column(title, field, runs));
  for (const std::string& field : options.more) {
    const std::size_t dot = field.find('.');
    out.push_back(
        number_column(dot == std::string::npos ? field : field.substr(dot + 1), field, runs));
  }
  std::erase_if(out, [](const column& c) { return c.empty(); });
  return out;
}

// Bytes of the longest start of `text` that is at most `width` wide and ends behind one of , + : /
// or, where there is none, in the middle of a word, but never inside a character.
std::size_t break_point(std::string_view text, std::size_t width) {
  std::size_t last = 0, i = 0;
  for (std::size_t columns = 0; i < text.size() && columns < width; ++columns) {
    ++i;
    while (i < text.size() && (static_cast<unsigned char>(text[i]) & 0xC0) == 0x80) ++i;
    if (i < text.size() && std::string_view(",+:/").find(text[i - 1]) != std::string_view::npos) {
      last = i;
    }
  }
  return i == text.size() || last == 0 ? i : last;
}

std::vector<std::string> wrap(const std::string& text, std::size_t width) {
  std::vector<std::string> lines;
  std::string_view rest = text;
  do {
    const std::string indent = lines.empty() ? "" : "  ";
    const std::size_t length = break_point(rest, width - indent.size());
    lines.push_back(indent + std::string(rest.substr(0, length)));
    rest.remove_prefix(length);
  } while (!rest.empty());
  return lines;
}

std::string padded(const std::string& text, std::size_t width, bool right) {
  const std::string blanks(width - std::min(width, display_width(text)), ' ');
  return right ? blanks + text : text + blanks;
}

void append_line(std::string line, std::string& out) {
  line.erase(line.find_last_not_of(' ') + 1);
  out += line + '\n';
}

struct layout {
  std::vector<column> columns;
  std::vector<std::vector<std::string>> labels;  // wrapped, one list per row
  std::size_t label_width = 0;
};

layout arrange(std::span<const result> runs, const table_options& options) {
  layout out;
  out.columns = columns_of(runs, options);
  std::size_t taken = 0;
  for (const column& c : out.columns) taken += gap + c.width();
  const std::size_t room = std::max(min_label, options.width - std::min(options.width, taken));
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const bool given = i < options.labels.size() && !options.labels[i].empty();
    out.labels.push_back(wrap(safe(given ? options.labels[i] : runs[i].policy), room));
    for (const auto& line : out.labels.back()) {
      out.label_width = std::max(out.label_width, display_width(line));
    }
  }
  out.label_width = std::max(out.label_width, display_width("policy"));
  return out;
}

std::string header(const layout& l, bool unicode) {
  std::string titles = padded("policy", l.label_width, false), out;
  std::size_t width = l.label_width;
  for (const column& c : l.columns) {
    titles += std::string(gap, ' ') + padded(c.title, c.width(), c.right);
    width += gap + c.width();
  }
  append_line(titles, out);
  for (std::size_t i = 0; i < width; ++i) out += unicode ? "\u2500" : "-";
  return out + '\n';
}

}  // namespace

std::string four_digits(double value) {
  if (value == 0) return "0";
  if (!std::isfinite(value)) return fmt::format("{}", value);
  // The exponent after rounding to 4 digits, so that 9.99996 becomes 10.00.
  const std::string rounded = fmt::format("{:.3e}", value);
  int exponent = 0;
  for (double m = std::abs(value); exponent < 6 && m >= 9.9995; m /= 10) ++exponent;
  for (double m = std::abs(value); exponent > -6 && m < 0.99995; m *= 10) --exponent;
  if (exponent < -4 || exponent > 5) return rounded;
  return fmt::format("{:.{}f}", value, std::max(0, 3 - exponent));
}

std::string short_policy(const result& r,
                         std::span<const std::pair<std::string, std::string>> defaults) {
  std::string out = r.name;
  std::string part;  // the modifier whose parameters are being listed; empty: the policy itself
  bool first = true;
  for (const auto& param : r.params) {
    if (std::find(defaults.begin(), defaults.end(), param) != defaults.end()) continue;
    const auto dot = param.first.find('.');
    const std::string owner = dot == std::string::npos ? "" : param.first.substr(0, dot);
    if (owner != part) {
      out += fmt::format("+{}", owner);
      part = owner;
      first = true;
    }
    const auto key = owner.empty() ? param.first : param.first.substr(dot + 1);
    out += fmt::format("{}{}={}", first ? ':' : ',', key, param.second);
    first = false;
  }
  return out;
}

std::string to_table(std::span<const result> given, const table_options& options) {
  std::vector<result> runs;
  for (const result& r : given) runs.push_back(finite(r));
  const layout l = arrange(runs, options);
  std::string out = header(l, options.unicode);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    for (std::size_t k = 0; k < l.labels[i].size(); ++k) {
      std::string line = padded(l.labels[i][k], l.label_width, false);
      for (const column& c : l.columns) {
        line += std::string(gap, ' ') + padded(k == 0 ? c.cells[i] : "", c.width(), c.right);
      }
      append_line(line, out);
    }
    if (runs[i].status != "ok") {
      append_line(fmt::format("  {}: {}", safe(runs[i].status), safe(runs[i].note)), out);
    }
  }
  for (const std::string& line : options.footer) append_line(safe(line), out);
  return out;
}

}  // namespace kvreplay::reports
