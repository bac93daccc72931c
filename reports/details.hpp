// How a row went over the steps and over the heads: what the charts of a report are drawn from.
// Small enough to stand in results.json; METRICS.md ("Details") says what is kept and what is not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace kvreplay::reports {

inline constexpr std::size_t max_series_points = 512;
inline constexpr std::size_t confidence_bins = 40;  // equal, over [0, 1]; 1 is in the last
inline constexpr std::size_t detailed_rows = 32;    // first rows of a report that keep details

// A line through (step, value): straight between neighbouring points.
struct point_series {
  std::vector<std::int64_t> step;  // ascending
  std::vector<double> value;       // as many
  bool operator==(const point_series&) const = default;
};

// Means over the scored steps, [layers, kv_heads]; empty where not measured.
struct head_map {
  std::vector<int> layers;  // recorded layers, ascending
  int kv_heads = 0;
  std::vector<std::optional<double>> entries, attention_recall, output_rel_l2;
  bool operator==(const head_map&) const = default;
};

struct row_details {
  std::map<std::string, point_series> series;      // "bytes", "full_bytes", "confidence", "budget"
  std::vector<std::int64_t> confidence_histogram;  // [confidence_bins] or empty: scored steps
  std::optional<head_map> heads;
  std::vector<std::int64_t> needle;  // [begin, end) of the first `needle` span
  bool operator==(const row_details&) const = default;
};

// values[i] belongs to step first + i. Points on the straight line between their neighbours are
// left out, which loses nothing; if more than max_series_points are left, the smallest and the
// largest value of each of 256 equal stretches. Values are rounded to 7 significant digits; a value
// that is not finite is left out.
point_series compact_series(std::int64_t first, std::span<const double> values);

// Counts of `values` in confidence_bins.
std::vector<std::int64_t> confidence_counts(std::span<const double> values);

// To `digits` significant digits, so that files stay small; 0 and what is not finite stay.
double rounded(double value, int digits);

// Leaves out points and cells that are not finite.
void drop_non_finite(row_details& details);

struct result;

// Keeps details for the first `detailed_rows` rows and for those on the Pareto front (of
// pareto.hpp, or marked before), at most twice as many; the others keep the needle's place alone.
void trim_details(std::span<result> rows);

}  // namespace kvreplay::reports
