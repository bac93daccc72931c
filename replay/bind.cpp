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

kernels::mass_layout layout_of(const policies::score_rule& score) {
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
    case policies::score_kind::history:
    case policies::score_kind::observed:
      rules.rank = kernels::rank_rule::given;
      break;
    case policies::score_kind::retention:
    case policies::score_kind::key_norm:
    case policies::score_kind::key_difference:
    case policies::score_kind::redundancy:
    case policies::score_kind::future:
    case policies::score_kind::given:
    case policies::score_kind::image:
      rules.rank = kernels::rank_rule::given;
      return rules;
  }
  rules.mass = layout_of(score);
  return rules;
}

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
