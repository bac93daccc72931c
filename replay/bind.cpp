#include "replay/bind.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "kernels/confidence.hpp"

namespace kvreplay::replay {
namespace {

kernels::rope_pairing pairing_for(const std::string& rope) {
  if (rope == "half") return kernels::rope_pairing::half;
  if (rope == "interleaved") return kernels::rope_pairing::interleaved;
  return kernels::rope_pairing::none;
}

kernels::mass_layout layout_for(const policies::score_rule& score) {
  if (score.scope == policies::score_scope::layer) return kernels::mass_layout::layer_mean;
  switch (score.gqa) {
    case policies::group_reduce::mean:
      return kernels::mass_layout::mean;
    case policies::group_reduce::max:
      return kernels::mass_layout::max;
    case policies::group_reduce::sum:
      return kernels::mass_layout::sum;
  }
  throw std::logic_error("unknown group reduction");
}

kernels::scale_format scales_for(const policies::precision_rule& precision) {
  switch (precision.scales) {
    case policies::scale_kind::hybrid:
      return kernels::scale_format::hybrid;
    case policies::scale_kind::token:
      return kernels::scale_format::token;
    case policies::scale_kind::channel:
      return precision.channel_static ? kernels::scale_format::channel_static
                                      : kernels::scale_format::channel_grow;
    case policies::scale_kind::group:
      return kernels::scale_format::group;
  }
  throw std::logic_error("unknown scale format");
}

// The row of logit_pos from which `count` consecutive positions start at `first`; -1 if there is
// no such run.
std::int64_t find_run(const std::vector<std::int32_t>& positions, std::int64_t first,
                      std::int64_t count) {
  const auto at = std::lower_bound(positions.begin(), positions.end(), first);
  const auto row = at - positions.begin();
  if (static_cast<std::int64_t>(positions.size()) - row < count) return -1;
  for (std::int64_t i = 0; i < count; ++i) {
    if (positions[static_cast<size_t>(row + i)] != first + i) return -1;
  }
  return row;
}

std::string missing_prompt_rows(const policies::policy& policy, const traces::reader& trace,
                                const traces::sequence_info& info) {
  for (const int layer : trace.model().layers) {
    const auto& have = trace.layer(info.id, layer);
    const std::int64_t first =
        policy.needs.prompt_rows < 0
            ? 0
            : std::max<std::int64_t>(0, info.n_prompt - policy.needs.prompt_rows);
    // Column sums per query head stand in for the rows, except where a maximum over the heads of
    // each row comes before the sum.
    const bool sums_do = policy.needs.prompt_rows < 0 && have.has_column_sum &&
                         policy.score.gqa != policies::group_reduce::max;
    if (have.first_row > first && !sums_do) {
      return fmt::format(
          "{}: {} reads the prompt's queries from position {} on, but layer {} of sequence {} has "
          "q from position {} only; record with --rows all",
          trace.path(), policy.name, first, layer, info.id, have.first_row);
    }
  }
  return {};
}

}  // namespace

kernels::cache_shape cache_shape_for(const traces::model_info& model, std::span<const int> layers) {
  kernels::cache_shape shape;
  shape.layers = static_cast<int>(layers.size());
  shape.q_heads = model.n_q_heads;
  shape.kv_heads = model.n_kv_heads;
  shape.head_dim = model.head_dim;
  shape.value_dim = model.value_dim;
  shape.softmax_scale = model.softmax_scale;
  shape.rope = pairing_for(model.rope);
  shape.rope_dim = model.rope_dim;
  for (const int layer : layers) {
    shape.window.push_back(model.window[static_cast<size_t>(layer)]);
    if (!model.sinks.empty()) {
      const auto row = model.sinks.begin() + static_cast<std::ptrdiff_t>(layer) * model.n_q_heads;
      shape.sink_logits.insert(shape.sink_logits.end(), row, row + model.n_q_heads);
    }
  }
  return shape;
}

kernels::storage_format storage_for(const policies::precision_rule& precision) {
  kernels::storage_format format;
  format.page = precision.page;
  if (precision.body == policies::body_kind::none) return format;
  format.body = precision.body == policies::body_kind::int8 ? kernels::body_format::int8
                                                            : kernels::body_format::int4;
  format.scales = scales_for(precision);
  format.tail_window = precision.window;
  format.tail_sinks = precision.sinks;
  format.static_margin = static_cast<float>(precision.margin);
  return format;
}

policies::model_dims dims_for(const traces::model_info& model) {
  policies::model_dims dims;
  dims.n_layers = model.n_layers;
  dims.n_kv_heads = model.n_kv_heads;
  dims.head_dim = model.head_dim;
  dims.value_dim = model.value_dim;
  dims.window = model.window;
  dims.recorded_layers = model.layers;
  return dims;
}

kernel_rules rules_for(const policies::score_rule& score) {
  kernel_rules rules;
  rules.one_set = score.scope == policies::score_scope::layer;
  rules.seed = score.seed;
  switch (score.kind) {
    case policies::score_kind::position:
      rules.rank = kernels::rank_rule::position;
      return rules;
    case policies::score_kind::hash:
      rules.rank = kernels::rank_rule::hash;
      return rules;
    case policies::score_kind::sum:
      rules.update = kernels::score_rule::sum;
      rules.rank = kernels::rank_rule::score;
      break;
    case policies::score_kind::last:
      rules.update = kernels::score_rule::last;
      rules.rank = kernels::rank_rule::score;
      break;
    case policies::score_kind::ema:
      rules.update = kernels::score_rule::ema;
      rules.rank = score.mass == policies::mass_scale::log ? kernels::rank_rule::ema_log
                                                           : kernels::rank_rule::ema_max;
      rules.decay = static_cast<float>(score.decay);
      rules.recency = static_cast<float>(score.recency);
      break;
  }
  rules.mass = layout_for(score);
  return rules;
}

std::string missing_for(const policies::policy& policy, const traces::reader& trace, int sequence) {
  const auto& info = trace.sequence(sequence);
  const auto& model = trace.model();
  if (model.key_rotation == "raw" && model.rope != "none") {
    return fmt::format(
        "{}: keys were recorded before rotation (key_rotation = raw), which replay cannot attend "
        "to; record rotated keys",
        trace.path());
  }
  for (const int layer : model.layers) {
    const auto& have = trace.layer(sequence, layer);
    for (const auto& [present, name] :
         {std::pair{have.has_q, "q"}, {have.has_k, "k"}, {have.has_v, "v"}}) {
      if (!present) {
        return fmt::format(
            "{}: {} needs dataset {} of layer {}, sequence {}; record it with q, k, v",
            trace.path(), policy.name, name, layer, sequence);
      }
    }
  }
  if (policy.needs.confidence) {
    const bool logits_only = policy.needs.full_logits;
    const bool there = logits_only ? info.has_logits : info.has_logits || info.has_confidence;
    if (!there || find_run(info.logit_pos, info.n_prompt - 1, info.n_decode() + 1) < 0) {
      return fmt::format(
          "{}: {} needs {} at positions {}..{} of sequence {}; record with --logits {}",
          trace.path(), policy.name, logits_only ? "logits" : "confidence or logits",
          info.n_prompt - 1, info.n_tokens - 1, sequence, logits_only ? "full" : "stats");
    }
  }
  if (policy.needs.prompt_rows != 0) return missing_prompt_rows(policy, trace, info);
  return {};
}

std::vector<double> recorded_confidence(const traces::reader& trace, int sequence,
                                        const policies::gate_rule& gate) {
  const auto& info = trace.sequence(sequence);
  const std::int64_t count = info.n_decode() + 1;
  const std::int64_t row = find_run(info.logit_pos, info.n_prompt - 1, count);
  if (row < 0) return {};
  const kernels::confidence_weights weights{gate.w_entropy, gate.w_margin, gate.w_top};
  const int vocab = trace.model().vocab_size;
  std::vector<double> c;
  c.reserve(static_cast<size_t>(count));
  if (info.has_confidence && gate.temperature == 1) {
    const auto columns = trace.confidence(sequence);
    for (std::int64_t i = 0; i < count; ++i) {
      const float* x = &columns[static_cast<size_t>(4 * (row + i))];
      c.push_back(kernels::confidence(x[0], x[1], x[2], vocab, weights));
    }
    return c;
  }
  if (!info.has_logits) return {};
  for (std::int64_t i = 0; i < count; ++i) {
    auto logits = trace.logits(sequence, row + i, row + i + 1);
    logits.resize(static_cast<size_t>(vocab));
    if (gate.temperature != 1) {
      for (float& x : logits) x = static_cast<float>(x / gate.temperature);
    }
    try {
      const auto s = kernels::summarise_logits(logits);
      c.push_back(kernels::confidence(s.entropy, s.margin, s.top, vocab, weights));
    } catch (const std::domain_error& e) {
      throw traces::trace_error(fmt::format("{}: logits of sequence {}, step {}: {}", trace.path(),
                                            sequence, info.n_prompt - 1 + i, e.what()));
    }
  }
  return c;
}

}  // namespace kvreplay::replay
