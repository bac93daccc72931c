// offers: what a policy reads against what a trace has.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "replay/bind.hpp"

namespace kvreplay::replay {
namespace {

struct question {
  const policies::policy& policy;
  const traces::reader& trace;
  const traces::sequence_info& info;
  std::string lacks(int layer, std::string_view dataset, std::string_view remedy) const {
    return fmt::format("{}: {} needs dataset {} of layer {}, sequence {}; {}", trace.path(),
                       policy.name, dataset, layer, info.id, remedy);
  }
};

std::int64_t first_prompt_row(const question& ask) {
  const std::int64_t rows = ask.policy.needs.prompt_rows;
  return rows < 0 ? 0 : std::max<std::int64_t>(0, ask.info.n_prompt - rows);
}

// q, k and v of a layer, or attention rows of all steps in their place.
std::string missing_attention(const question& ask, int layer) {
  const auto& have = ask.trace.layer(ask.info.id, layer);
  if (have.has_q && have.has_k && have.has_v) return {};
  if (have.has_q || have.has_k || have.has_v || !have.has_attn) {
    const char* name = !have.has_q ? "q" : !have.has_k ? "k" : "v";
    return ask.lacks(layer, name, "record it with q, k, v");
  }
  if (ask.policy.needs.keys) {
    return ask.lacks(layer, "k", "attention alone does not do; record it with q, k, v");
  }
  if (ask.policy.precision.body != policies::body_kind::none) {
    return ask.lacks(layer, "k", "without values nothing can be quantised; record it with q, k, v");
  }
  const auto rows = ask.trace.attention_positions(ask.info.id, layer);
  const bool sums_do = ask.policy.needs.prompt_rows < 0 && have.has_column_sum &&
                       ask.policy.score.gqa != policies::group_reduce::max;
  const std::int64_t first =
      ask.policy.needs.prompt_rows == 0 || sums_do ? ask.info.n_prompt : first_prompt_row(ask);
  if (find_run(rows, first, ask.info.n_tokens - first) >= 0) return {};
  return ask.lacks(layer, "attn",
                   fmt::format("rows of all positions {}..{} are needed; record with --attention "
                               "full, or with q, k, v",
                               first, ask.info.n_tokens - 1));
}

std::string missing_prompt_rows(const question& ask, int layer) {
  const auto& have = ask.trace.layer(ask.info.id, layer);
  if (ask.policy.needs.prompt_rows == 0 || !have.has_q) return {};
  const std::int64_t first = first_prompt_row(ask);
  // Column sums per query head stand in for the rows, except where a maximum over the heads of each
  // row comes before the sum.
  const bool sums_do = ask.policy.needs.prompt_rows < 0 && have.has_column_sum &&
                       ask.policy.score.gqa != policies::group_reduce::max;
  if (have.first_row <= first || sums_do) return {};
  return fmt::format(
      "{}: {} reads the prompt's queries from position {} on, but layer {} of sequence {} has q "
      "from position {} only; record with --rows all",
      ask.trace.path(), ask.policy.name, first, layer, ask.info.id, have.first_row);
}

std::string missing_in_layer(const question& ask, int layer) {
  const auto& have = ask.trace.layer(ask.info.id, layer);
  const auto& needs = ask.policy.needs;
  const auto& wo = ask.trace.model().wo_layers;
  if (auto line = missing_attention(ask, layer); !line.empty()) return line;
  if (auto line = missing_prompt_rows(ask, layer); !line.empty()) return line;
  const bool projected = have.has_v && std::count(wo.begin(), wo.end(), layer) > 0;
  if (needs.value_norm && !have.has_value_norm && !projected) {
    return ask.lacks(layer, "value_norm (or wo)", "record with --with value_norm");
  }
  if (needs.retention && !have.has_retention) {
    return ask.lacks(layer, "retention",
                     "record a gate-equipped model, or learn it with kvreplay fit-retention");
  }
  if (needs.image_score && !have.has_image_score) {
    return ask.lacks(layer, "image_score", "record it with the vision encoder's saliency");
  }
  return {};
}

std::string missing_confidence(const question& ask) {
  const auto& [policy, trace, info] = ask;
  if (!policy.needs.confidence) return {};
  const bool logits_only = policy.needs.full_logits;
  const bool there = logits_only ? info.has_logits : info.has_logits || info.has_confidence;
  if (there && find_run(info.logit_pos, info.n_prompt - 1, info.n_decode() + 1) >= 0) return {};
  return fmt::format("{}: {} needs {} at positions {}..{} of sequence {}; record with --logits {}",
                     trace.path(), policy.name, logits_only ? "logits" : "confidence or logits",
                     info.n_prompt - 1, info.n_tokens - 1, info.id, logits_only ? "full" : "stats");
}

std::string missing_in_model(const question& ask) {
  const auto& model = ask.trace.model();
  const auto& needs = ask.policy.needs;
  if (model.key_rotation == "raw" && model.rope != "none") {
    return fmt::format(
        "{}: keys were recorded before rotation (key_rotation = raw), which replay cannot attend "
        "to; record rotated keys",
        ask.trace.path());
  }
  if (needs.rope && (model.rope == "none" || model.rope_inv_freq.empty())) {
    return fmt::format(
        "{}: {} needs dataset rope_inv_freq of a model with rotary positions (rope = {}); record "
        "with kvreplay record",
        ask.trace.path(), ask.policy.name, model.rope);
  }
  if (needs.all_layers && !model.records_all_layers()) {
    return fmt::format(
        "{}: {} has one budget over all layers and needs them all, but {} of {} are recorded; "
        "record without --layers",
        ask.trace.path(), ask.policy.name, model.layers.size(), model.n_layers);
  }
  if (!needs.image_span) return {};
  if (ask.info.spans.count("image") == 0) {
    return fmt::format(
        "{}: {} needs spans/image of sequence {}; record the ranges of the image tokens there",
        ask.trace.path(), ask.policy.name, ask.info.id);
  }
  const int before = ask.policy.image.layer - 1;
  if (ask.policy.image.dominant < 0 &&
      std::count(model.layers.begin(), model.layers.end(), before) == 0) {
    return fmt::format("{}: {} ranks by layer {}, which is not recorded; record with --layers {}",
                       ask.trace.path(), ask.policy.name, before, before);
  }
  return {};
}

}  // namespace

std::string missing_for(const policies::policy& policy, const traces::reader& trace, int sequence) {
  const question ask{policy, trace, trace.sequence(sequence)};
  if (auto line = missing_in_model(ask); !line.empty()) return line;
  for (const int layer : trace.model().layers) {
    if (auto line = missing_in_layer(ask, layer); !line.empty()) return line;
  }
  return missing_confidence(ask);
}

}  // namespace kvreplay::replay
