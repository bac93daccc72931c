#include "reports/pareto.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

namespace kvreplay::reports {
namespace {

constexpr std::array<std::string_view, 5> preferred{"logit_kl", "kl_proxy", "residual_rel_l2",
                                                    "output_rel_l2", "attention_recall"};

struct point {
  double bytes, loss;  // loss: less is better
  size_t row;
};

void front_of_group(std::vector<point>& points, std::vector<bool>& out) {
  std::sort(points.begin(), points.end(), [](const point& a, const point& b) {
    return std::tie(a.bytes, a.loss) < std::tie(b.bytes, b.loss);
  });
  double best_before = std::numeric_limits<double>::infinity();  // among fewer bytes
  for (size_t i = 0; i < points.size();) {
    size_t end = i;
    while (end < points.size() && points[end].bytes == points[i].bytes) ++end;
    const double best_here = points[i].loss;
    for (size_t j = i; j < end; ++j) {
      out[points[j].row] = points[j].loss <= best_here && points[j].loss < best_before;
    }
    best_before = std::min(best_before, best_here);
    i = end;
  }
}

bool comparable(const result& row, const maybe& quality) {
  return row.status == "ok" && quality && row.memory.mean_bytes;
}

}  // namespace

bool higher_is_better(std::string_view metric) {
  constexpr std::array<std::string_view, 9> names{
      "attention_recall", "recall_bound",   "output_cosine", "heads_improved", "evidence_kept",
      "evidence_gain",    "top1_agreement", "gap_closed",    "answer_accuracy"};
  return std::find(names.begin(), names.end(), metric) != names.end() ||
         metric.starts_with("kept_share.");
}

maybe quality_of(const result& row, std::string_view metric) {
  maybe out;
  for_each_number(row, [&](std::string_view section, std::string_view name, const maybe& value) {
    if (section == "quality" && name == metric) out = value;
  });
  return out;
}

std::string_view common_quality(std::span<const result> rows) {
  for (const auto metric : preferred) {
    bool any = false, all = true;
    for (const auto& row : rows) {
      if (row.status != "ok") continue;
      any = true;
      all = all && quality_of(row, metric).has_value();
    }
    if (any && all) return metric;
  }
  return {};
}

std::string_view ranking_metric(std::span<const result> rows) {
  std::array<size_t, preferred.size()> filled{};
  size_t scored = 0;
  for (const auto& row : rows) {
    if (row.status != "ok") continue;
    bool any = false;
    for (size_t i = 0; i < preferred.size(); ++i) {
      const bool measured = quality_of(row, preferred[i]).has_value();
      filled[i] += measured ? 1 : 0;
      any = any || measured;
    }
    scored += any ? 1 : 0;
  }
  if (scored == 0) return {};
  auto best = std::find(filled.begin(), filled.end(), scored);
  if (best == filled.end()) best = std::max_element(filled.begin(), filled.end());
  return preferred[static_cast<size_t>(best - filled.begin())];
}

std::vector<bool> pareto_front(std::span<const result> rows, std::string_view metric) {
  std::map<std::tuple<std::string, int, std::string>, std::vector<point>> groups;
  const double sign = higher_is_better(metric) ? -1 : 1;
  for (size_t i = 0; i < rows.size(); ++i) {
    const maybe quality = quality_of(rows[i], metric);
    if (!comparable(rows[i], quality)) continue;
    groups[{rows[i].trace, rows[i].sequence, rows[i].mode}].push_back(
        {*rows[i].memory.mean_bytes, sign * *quality, i});
  }
  std::vector<bool> out(rows.size());
  for (auto& [key, points] : groups) front_of_group(points, out);
  return out;
}

void mark_pareto(std::span<result> rows, std::string_view metric) {
  const auto front = pareto_front(rows, metric);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (comparable(rows[i], quality_of(rows[i], metric))) rows[i].pareto = front[i] ? 1 : 0;
  }
}

}  // namespace kvreplay::reports
