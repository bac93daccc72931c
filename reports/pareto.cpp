#include "reports/pareto.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <tuple>
#include <vector>

namespace kvreplay::reports {
namespace {

struct point {
  double bytes, loss;  // loss: less is better
  result* row;
};

void mark_group(std::vector<point>& points) {
  std::sort(points.begin(), points.end(), [](const point& a, const point& b) {
    return std::tie(a.bytes, a.loss) < std::tie(b.bytes, b.loss);
  });
  double best_before = std::numeric_limits<double>::infinity();  // among fewer bytes
  for (size_t i = 0; i < points.size();) {
    size_t end = i;
    while (end < points.size() && points[end].bytes == points[i].bytes) ++end;
    const double best_here = points[i].loss;
    for (size_t j = i; j < end; ++j) {
      const bool beaten = points[j].loss > best_here || points[j].loss >= best_before;
      points[j].row->pareto = beaten ? 0 : 1;
    }
    best_before = std::min(best_before, best_here);
    i = end;
  }
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
  constexpr std::array<std::string_view, 5> preferred{"logit_kl", "kl_proxy", "residual_rel_l2",
                                                      "output_rel_l2", "attention_recall"};
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

void mark_pareto(std::span<result> rows, std::string_view metric) {
  std::map<std::tuple<std::string, int, std::string>, std::vector<point>> groups;
  const double sign = higher_is_better(metric) ? -1 : 1;
  for (auto& row : rows) {
    const maybe quality = quality_of(row, metric);
    if (row.status != "ok" || !quality || !row.memory.mean_bytes) continue;
    groups[{row.trace, row.sequence, row.mode}].push_back(
        {*row.memory.mean_bytes, sign * *quality, &row});
  }
  for (auto& [key, points] : groups) mark_group(points);
}

}  // namespace kvreplay::reports
