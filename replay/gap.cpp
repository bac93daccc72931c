#include "replay/gap.hpp"

#include <cmath>
#include <string_view>
#include <utility>

namespace kvreplay::replay {
namespace {

constexpr double least_distance = 0.05;  // in perplexity

bool comparable(const reports::result& row) {
  return row.mode == "closed" && row.status == "ok" && row.quality.ppl && row.memory.mean_bytes;
}

const reports::result* reference_for(std::span<const reports::result> rows,
                                     const reports::result& row, std::string_view name) {
  const reports::result* best = nullptr;
  for (const auto& r : rows) {
    if (!comparable(r) || r.name != name || r.trace_fingerprint != row.trace_fingerprint ||
        r.sequence != row.sequence || *r.memory.mean_bytes > *row.memory.mean_bytes) {
      continue;
    }
    if (best == nullptr || *r.memory.mean_bytes > *best->memory.mean_bytes) best = &r;
  }
  return best;
}

reports::maybe gap(const reports::result& row, const reports::result& reference) {
  const double distance = *reference.quality.ppl - *row.quality.full_ppl;
  if (std::fabs(distance) < least_distance) return std::nullopt;
  return (*reference.quality.ppl - *row.quality.ppl) / distance;
}

}  // namespace

void fill_gaps(std::span<reports::result> rows) {
  for (auto& row : rows) {
    if (!comparable(row)) continue;
    row.gap_reference.clear();
    for (const auto& [name, to] : {std::pair{"window", &row.quality.gap_closed},
                                   {"streaming", &row.quality.gap_closed_streaming}}) {
      to->reset();
      const auto* reference = reference_for(rows, row, name);
      if (reference == nullptr || reference == &row) continue;
      *to = gap(row, *reference);
      if (!*to) continue;
      row.gap_reference += (row.gap_reference.empty() ? "" : "; ") + reference->policy;
    }
  }
}

}  // namespace kvreplay::replay
