#include "reports/details.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "reports/pareto.hpp"
#include "reports/result.hpp"

namespace kvreplay::reports {
namespace {

void append(point_series& out, std::int64_t step, double value) {
  out.step.push_back(step);
  out.value.push_back(value);
}

// Without the points that a straight line through the neighbours gives exactly.
point_series without_straights(const point_series& all) {
  point_series out;
  const std::size_t n = all.step.size();
  for (std::size_t i = 0; i < n; ++i) {
    const bool inside = i > 0 && i + 1 < n && all.step[i] - all.step[i - 1] == 1 &&
                        all.step[i + 1] - all.step[i] == 1;
    if (inside && all.value[i] - all.value[i - 1] == all.value[i + 1] - all.value[i]) continue;
    append(out, all.step[i], all.value[i]);
  }
  return out;
}

// The smallest and largest value of each stretch, in the order in which they stand.
point_series extremes(const point_series& all) {
  constexpr std::size_t stretches = max_series_points / 2;
  point_series out;
  const std::size_t n = all.step.size();
  for (std::size_t s = 0; s < stretches; ++s) {
    const std::size_t begin = s * n / stretches, end = (s + 1) * n / stretches;
    if (begin == end) continue;
    std::size_t low = begin, high = begin;
    for (std::size_t i = begin; i < end; ++i) {
      if (all.value[i] < all.value[low]) low = i;
      if (all.value[i] > all.value[high]) high = i;
    }
    const auto [first, second] = std::minmax(low, high);
    append(out, all.step[first], all.value[first]);
    if (second != first) append(out, all.step[second], all.value[second]);
  }
  return out;
}

}  // namespace

double rounded(double value, int digits) {
  if (value == 0 || !std::isfinite(value)) return value;
  return std::strtod(fmt::format("{:.{}e}", value, digits - 1).c_str(), nullptr);
}

point_series compact_series(std::int64_t first, std::span<const double> values) {
  point_series all;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i])) append(all, first + static_cast<std::int64_t>(i), values[i]);
  }
  point_series out = without_straights(all);
  if (out.step.size() > max_series_points) out = extremes(all);
  for (double& value : out.value) value = rounded(value, 7);
  return out;
}

std::vector<std::int64_t> confidence_counts(std::span<const double> values) {
  std::vector<std::int64_t> out(confidence_bins);
  constexpr auto bins = static_cast<double>(confidence_bins);
  for (const double c : values) {
    if (!(c >= 0 && c <= 1)) continue;
    ++out[std::min(confidence_bins - 1, static_cast<std::size_t>(c * bins))];
  }
  return out;
}

void drop_non_finite(row_details& details) {
  for (auto& [name, series] : details.series) {
    point_series kept;
    for (std::size_t i = 0; i < series.step.size(); ++i) {
      if (std::isfinite(series.value[i])) append(kept, series.step[i], series.value[i]);
    }
    series = std::move(kept);
  }
  if (!details.heads) return;
  auto& heads = *details.heads;
  for (auto* cells : {&heads.entries, &heads.attention_recall, &heads.output_rel_l2}) {
    for (auto& cell : *cells) {
      if (cell && !std::isfinite(*cell)) cell.reset();
    }
  }
}

void trim_details(std::span<result> rows) {
  const std::vector<bool> front = pareto_front(rows, ranking_metric(rows));
  std::size_t left = 2 * detailed_rows;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    auto& details = rows[i].details;
    if (!details || (details->series.empty() && !details->heads)) continue;
    const bool marked = front[i] || rows[i].pareto.value_or(0) == 1;
    if ((i < detailed_rows || marked) && left > 0) {
      --left;
      continue;
    }
    row_details rest;
    rest.needle = details->needle;
    if (rest.needle.empty()) {
      details.reset();
    } else {
      details = std::move(rest);
    }
  }
}

}  // namespace kvreplay::reports
