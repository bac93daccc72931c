#include "replay/row_details.hpp"

#include <cmath>
#include <optional>

namespace kvreplay::replay {
namespace {

constexpr int head_digits = 5;  // a colour needs no more

}  // namespace

reports::row_details step_details(const lane_measures& measures, int kv_heads,
                                  const traces::sequence_info& info,
                                  std::span<const std::int64_t> full_bytes,
                                  std::span<const double> confidence, std::int64_t skip) {
  std::vector<double> bytes, budget;
  const double heads = static_cast<double>(measures.layers_count) * kv_heads;
  bool limited = true;
  for (std::int64_t t = 0; t < measures.step_count; ++t) {
    double held = 0, allowed = 0;
    for (int l = 0; l < measures.layers_count; ++l) {
      const auto& at = measures.at(l, t);
      held += static_cast<double>(at.bytes);
      allowed += static_cast<double>(at.budget);
      limited = limited && at.budget >= 0;
    }
    bytes.push_back(held);
    budget.push_back(allowed / heads);
  }
  reports::row_details out;
  const std::vector<double> everything(full_bytes.begin(), full_bytes.end());
  out.series["bytes"] = reports::compact_series(info.n_prompt, bytes);
  out.series["full_bytes"] = reports::compact_series(info.n_prompt, everything);
  if (limited) out.series["budget"] = reports::compact_series(info.n_prompt, budget);
  if (!confidence.empty()) {
    out.series["confidence"] = reports::compact_series(info.n_prompt, confidence);
    out.confidence_histogram =
        reports::confidence_counts(confidence.subspan(static_cast<size_t>(skip)));
  }
  const auto needle = info.spans.find("needle");
  if (needle != info.spans.end() && !needle->second.empty()) {
    const auto& [begin, end] = needle->second.front();
    if (begin >= 0 && begin < end) out.needle = {begin, end};
  }
  return out;
}

reports::head_map head_details(const lane_measures& measures, const std::vector<int>& layers,
                               int kv_heads, const measured_parts& parts, std::int64_t scored) {
  reports::head_map out;
  out.layers = layers;
  out.kv_heads = kv_heads;
  const auto steps = static_cast<double>(scored);
  const auto cell = [](bool measured, double value) {
    return measured ? std::optional(reports::rounded(value, head_digits)) : std::nullopt;
  };
  for (const auto& at : measures.heads) {
    out.entries.push_back(cell(true, at.entries / steps));
    out.attention_recall.push_back(cell(parts.recall, at.recall / steps));
    const bool has_error = parts.output && at.reference2 > 0;
    out.output_rel_l2.push_back(
        cell(has_error, has_error ? std::sqrt(at.error2 / at.reference2) : 0));
  }
  return out;
}

}  // namespace kvreplay::replay
