#include "replay/measures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "reports/bootstrap.hpp"

namespace kvreplay::replay {
namespace {

// ||o^ - o|| / ||o||; both zero: 0; the reference alone zero: excluded.
std::optional<double> relative_error(const step_measure& m) {
  if (m.reference2 > 0) return std::sqrt(m.error2 / m.reference2);
  if (m.output2 == 0) return 0.0;
  return std::nullopt;
}

std::optional<double> cosine(const step_measure& m) {
  if (m.reference2 > 0 && m.output2 > 0) return m.dot / std::sqrt(m.reference2 * m.output2);
  if (m.reference2 == 0 && m.output2 == 0) return 1.0;
  return std::nullopt;
}

double nearest_rank(std::vector<double> values, double share) {
  const auto n = static_cast<double>(values.size());
  const auto rank = static_cast<size_t>(std::max(1.0, std::ceil(share * n)));
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(rank - 1);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// A metric as one value per scored step (already averaged over layers), then its mean.
class series {
 public:
  void add(double value) { values_.push_back(value); }
  reports::maybe mean() const {
    if (values_.empty()) return std::nullopt;
    double sum = 0;
    for (const double v : values_) sum += v;
    return sum / static_cast<double>(values_.size());
  }
  void store(reports::result& row, const char* name, reports::maybe& to) const {
    to = mean();
    if (const auto interval = reports::bootstrap_mean({&values_, 1})) {
      row.quality_ci[name] = *interval;
    }
  }

 private:
  std::vector<double> values_;
};

void reduce_memory(const lane_measures& m, const reduce_context& c, reports::result& row) {
  double bytes = 0, entries = 0, full = 0;
  std::int64_t peak = 0, full_peak = 0, state_peak = 0, loose = 0;
  double peak_entries = 0;
  const double heads = static_cast<double>(m.layers_count) * c.kv_heads;
  for (std::int64_t t = c.skip; t < m.step_count; ++t) {
    std::int64_t step_bytes = 0, step_entries = 0, state = 0;
    for (int l = 0; l < m.layers_count; ++l) {
      step_bytes += m.at(l, t).bytes;
      step_entries += m.at(l, t).entries;
      state += m.at(l, t).state_bytes;
    }
    const double mean_entries = static_cast<double>(step_entries) / heads;
    bytes += static_cast<double>(step_bytes);
    entries += mean_entries;
    peak = std::max(peak, step_bytes);
    state_peak = std::max(state_peak, state);
    peak_entries = std::max(peak_entries, mean_entries);
    if (c.loose_entries >= 0 && mean_entries > c.loose_entries + 1e-9) ++loose;
    full += static_cast<double>(c.full_bytes[static_cast<size_t>(t)]);
    full_peak = std::max(full_peak, c.full_bytes[static_cast<size_t>(t)]);
  }
  const auto n = static_cast<double>(m.step_count - c.skip);
  if (n == 0) return;
  auto& out = row.memory;
  out.mean_bytes = bytes / n;
  out.peak_bytes = static_cast<double>(peak);
  out.full_mean_bytes = full / n;
  out.full_peak_bytes = static_cast<double>(full_peak);
  out.memory_ratio = bytes / full;
  out.peak_ratio = static_cast<double>(peak) / static_cast<double>(full_peak);
  out.mean_entries = entries / n;
  out.peak_entries = peak_entries;
  out.policy_state_bytes = static_cast<double>(state_peak);
  if (c.loose_entries >= 0) row.confidence.loose_share = static_cast<double>(loose) / n;
}

void reduce_recall(const lane_measures& m, const reduce_context& c, reports::result& row) {
  series recall, bound;
  const double count = static_cast<double>(m.layers_count) * c.q_heads;
  for (std::int64_t t = c.skip; t < m.step_count; ++t) {
    double recall_sum = 0, bound_sum = 0;
    for (int l = 0; l < m.layers_count; ++l) {
      recall_sum += m.at(l, t).recall_sum;
      bound_sum += m.at(l, t).bound_sum;
    }
    recall.add(recall_sum / count);
    bound.add(bound_sum / count);
  }
  if (c.parts.recall) recall.store(row, "attention_recall", row.quality.attention_recall);
  if (c.parts.bound) row.quality.recall_bound = bound.mean();
}

void reduce_output(const lane_measures& m, const reduce_context& c, reports::result& row) {
  series error, cosines;
  std::vector<double> all;
  double error2 = 0, reference2 = 0;
  std::int64_t excluded = 0;
  for (std::int64_t t = c.skip; t < m.step_count; ++t) {
    double sum = 0, cosine_sum = 0;
    int count = 0, cosine_count = 0;
    for (int l = 0; l < m.layers_count; ++l) {
      const auto& at = m.at(l, t);
      error2 += at.error2;
      reference2 += at.reference2;
      if (const auto e = relative_error(at)) {
        sum += *e;
        ++count;
        all.push_back(*e);
      } else {
        ++excluded;
      }
      if (const auto x = cosine(at)) {
        cosine_sum += *x;
        ++cosine_count;
      }
    }
    if (count > 0) error.add(sum / count);
    if (cosine_count > 0) cosines.add(cosine_sum / cosine_count);
  }
  if (!all.empty()) {
    // The mean over (t, l) and the mean over t of means over l differ once rows are excluded.
    error.store(row, "output_rel_l2", row.quality.output_rel_l2);
    double total = 0;
    for (const double e : all) total += e;
    row.quality.output_rel_l2 = total / static_cast<double>(all.size());
    row.quality.output_rel_l2_p95 = nearest_rank(all, 0.95);
    if (reference2 > 0) row.quality.output_rel_l2_pooled = std::sqrt(error2 / reference2);
    cosines.store(row, "output_cosine", row.quality.output_cosine);
  }
  if (excluded > 0) {
    row.note += fmt::format("{}{} (step, layer) pairs with a zero reference output left out",
                            row.note.empty() ? "" : "; ", excluded);
  }
}

void reduce_projected(const lane_measures& m, const reduce_context& c, reports::result& row) {
  series residual, output, head;
  for (std::int64_t t = c.skip; t < m.step_count; ++t) {
    double residual_sum = 0, output_sum = 0, head_sum = 0;
    int output_count = 0;
    for (int l = 0; l < m.layers_count; ++l) {
      const auto& at = m.at(l, t);
      if (c.parts.residual) {
        const double norm = c.residual_norm[static_cast<size_t>(l)][static_cast<size_t>(t)];
        if (norm > 0) residual_sum += at.residual_error2 / (norm * norm);
      }
      head_sum += at.head_l1_sum;
      if (at.projected_reference_l1 > 0) {
        output_sum += at.projected_error_l1 / at.projected_reference_l1;
        ++output_count;
      }
    }
    residual.add(std::sqrt(residual_sum));
    head.add(head_sum / (static_cast<double>(m.layers_count) * c.q_heads));
    if (output_count > 0) output.add(output_sum / output_count);
  }
  if (c.parts.residual) residual.store(row, "residual_rel_l2", row.quality.residual_rel_l2);
  if (c.parts.projected) {
    row.quality.head_l1 = head.mean();
    output.store(row, "output_l1", row.quality.output_l1);
  }
}

// Share of the selections in which CriticalKV's assumption held.
void reduce_critical(const lane_measures& m, reports::result& row) {
  critical_measure sum;
  for (const auto& layer : m.critical) {
    sum.heads += layer.heads;
    sum.over_half += layer.over_half;
  }
  if (sum.heads == 0) return;
  row.quality.sigma_over_half = static_cast<double>(sum.over_half) / static_cast<double>(sum.heads);
}

void reduce_events(const lane_measures& m, const reduce_context& c, reports::result& row) {
  std::int64_t evicted = 0, selections = 0;
  bool degenerate = std::count(m.prompt_degenerate.begin(), m.prompt_degenerate.end(), 1) > 0;
  std::vector<double> attend;
  for (std::int64_t t = c.skip; t < m.step_count; ++t) {
    for (int l = 0; l < m.layers_count; ++l) {
      const auto& at = m.at(l, t);
      evicted += at.evicted;
      selections += at.evicted > 0 ? 1 : 0;
      degenerate = degenerate || at.degenerate;
      attend.push_back(at.attend_us);
    }
  }
  const auto n = static_cast<double>(m.step_count - c.skip);
  if (n == 0) return;
  row.events.evicted = static_cast<double>(evicted);
  row.events.selections = static_cast<double>(selections);
  row.events.kept_turnover =
      static_cast<double>(evicted) / (n * static_cast<double>(m.layers_count) * c.kv_heads);
  row.time.attend_us_p50 = nearest_rank(attend, 0.5);
  row.time.attend_us_p99 = nearest_rank(attend, 0.99);
  if (degenerate) {
    row.note += fmt::format("{}degenerate: protected >= budget", row.note.empty() ? "" : "; ");
  }
}

}  // namespace

void take_events(const step_events& from, step_measure& to) {
  to.bytes = from.bytes;
  to.state_bytes = from.state_bytes;
  to.entries = from.entries;
  to.evicted = from.evicted;
  to.budget = from.budget;
  to.degenerate = from.degenerate;
  to.attend_us = from.us.attend;
}

void reduce_measures(const lane_measures& measures, const reduce_context& context,
                     reports::result& row) {
  reduce_memory(measures, context, row);
  reduce_recall(measures, context, row);
  if (context.parts.output) reduce_output(measures, context, row);
  if (context.parts.residual || context.parts.projected) {
    reduce_projected(measures, context, row);
  }
  reduce_critical(measures, row);
  reduce_events(measures, context, row);
}

}  // namespace kvreplay::replay
