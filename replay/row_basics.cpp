#include "replay/row_basics.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace kvreplay::replay {

void add_note(reports::result& row, const std::string& text) {
  row.note += fmt::format("{}{}", row.note.empty() ? "" : "; ", text);
}

void describe_row(const traces::reader& trace, int sequence, const policies::policy& policy,
                  int layers, std::int64_t skip, const char* mode, reports::result& row) {
  const auto& info = trace.sequence(sequence);
  row.trace = trace.path();
  row.trace_fingerprint = trace.fingerprint(sequence);
  row.sequence = sequence;
  row.layers = fmt::format("{}/{}", layers, trace.model().n_layers);
  row.policy = policy.resolved;
  row.name = policy.name;
  row.params = policy.params;
  row.precision = policy.precision_name;
  row.mode = mode;
  row.seed =
      static_cast<std::int64_t>(policy.budget.gated ? policy.budget.gate.seed : policy.score.seed);
  row.tokens.prompt = info.n_prompt;
  row.tokens.decoded = info.n_decode();
  row.tokens.scored = info.n_decode() - skip;
  if (policy.needs.retention && row.mode == "open") {
    add_note(row, "retention as recorded in the trace");
  }
  if (policy.needs.image_span) {
    add_note(row, policy.needs.image_score
                      ? "images are cut after the prompt pass; tokens merged from what was cut are "
                        "not replayed"
                      : "images are cut after the prompt pass, not inside it");
  }
}

std::int64_t full_bytes(const kernels::cache_shape& shape, std::int64_t positions) {
  std::int64_t total = 0;
  for (int slot = 0; slot < shape.layers; ++slot) {
    const std::int64_t window = shape.window_of(slot);
    const std::int64_t held = window > 0 ? std::min(window, positions) : positions;
    total += held * shape.kv_heads * (shape.head_dim + shape.value_dim) * 2;
  }
  return total;
}

double loose_entries(const policies::policy& policy, const policies::budget_plan& plan,
                     std::span<const int> layers, std::int64_t last_step) {
  if (!policy.budget.gated) return -1;
  double sum = 0;
  for (const int layer : layers) sum += plan.share(last_step, layer, true);
  return sum / static_cast<double>(layers.size()) + 1;
}

}  // namespace kvreplay::replay
