// For tests: a copy of a trace with something changed or left out.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/half.hpp"
#include "replay/bind.hpp"
#include "replay/layer_data.hpp"
#include "traces/reader.hpp"
#include "traces/writer.hpp"

namespace kvreplay::replay {

struct trace_copy {
  // From this position on q, v, retention, value norms and confidence are other ones, as if another
  // text had followed; o and lse, which would disagree, are left out.
  std::int64_t changed_from = std::numeric_limits<std::int64_t>::max();
  std::int64_t first_row = 0;  // of q
  bool keys = true;            // q, k, v
  bool attention = false;      // probability rows of all positions
  bool confidence = true, logits = false;
  bool retention = true, value_norm = true, wo = true;
  bool image_span = false, image_score = false;  // positions 5 .. 24; made up
  bool rope = false;                             // rotary frequencies, which the source lacks
  bool swapped_heads = false;                    // KV heads and their groups in reverse order
};

namespace copying {

// [rows, heads, width] with the heads in reverse order.
template <class T>
void reverse_heads(std::vector<T>& values, std::int64_t heads, std::int64_t width) {
  const auto row = static_cast<size_t>(heads * width);
  std::vector<T> out(values.size());
  for (size_t at = 0; at < values.size(); at += row) {
    for (std::int64_t h = 0; h < heads; ++h) {
      std::copy_n(values.begin() + static_cast<std::ptrdiff_t>(at) + h * width, width,
                  out.begin() + static_cast<std::ptrdiff_t>(at) + (heads - 1 - h) * width);
    }
  }
  values = std::move(out);
}

template <class T, class Change>
void change_rows(std::vector<T>& values, std::int64_t tokens, std::int64_t from, Change change) {
  const size_t width = values.size() / static_cast<size_t>(tokens);
  for (auto i = static_cast<size_t>(std::min(from, tokens)) * width; i < values.size(); ++i) {
    values[i] = change(values[i]);
  }
}

inline void copy_layer(const traces::reader& trace, int layer, const trace_copy& how,
                       const traces::sequence_plan& plan, traces::writer& out) {
  const auto& model = trace.model();
  const std::int64_t n = plan.n_tokens, from = how.changed_from;
  auto slice = trace.read_layer(0, layer, 0, n);
  const auto negate = [](traces::half_bits x) {
    return static_cast<traces::half_bits>(x ^ 0x8000U);
  };
  change_rows(slice.q, n, from, negate);
  change_rows(slice.v, n, from, negate);
  change_rows(slice.retention, n, from, [](float x) { return 3 * x - 0.01F; });
  change_rows(slice.value_norm, n, from, [](float x) { return std::fabs(7 - 0.5F * x); });
  if (how.swapped_heads) {
    const std::int64_t group = model.group();
    reverse_heads(slice.q, model.n_kv_heads, group * model.head_dim);
    reverse_heads(slice.k, model.n_kv_heads, model.head_dim);
    reverse_heads(slice.v, model.n_kv_heads, model.value_dim);
    reverse_heads(slice.retention, model.n_kv_heads, 1);
    reverse_heads(slice.value_norm, model.n_kv_heads, group);
  }
  if (plan.attn_pos.size() > 0) {
    const auto shape = cache_shape_for(model, {&layer, 1});
    const auto data = load_layer(trace, 0, layer);
    std::vector<float> rows(static_cast<size_t>(n * model.n_q_heads * n));
    full_rows_of(shape, data, 0, n, n, rows.data());
    std::vector<traces::half_bits> halves(rows.size());
    std::transform(rows.begin(), rows.end(), halves.begin(), kernels::float_to_half);
    const auto width = static_cast<size_t>(model.n_q_heads * n);
    for (std::int64_t t = 0; t < n; ++t) {
      out.put_attention(layer, t, std::span(halves).subspan(static_cast<size_t>(t) * width, width));
    }
  }
  if (how.keys) {
    slice.q.erase(slice.q.begin(),
                  slice.q.begin() + how.first_row * model.n_q_heads * model.head_dim);
    out.put_q(layer, how.first_row, slice.q);
    out.put_k(layer, 0, slice.k);
    out.put_v(layer, 0, slice.v);
  }
  if (plan.retention) out.put_retention(layer, 0, slice.retention);
  if (plan.value_norm) out.put_value_norm(layer, 0, slice.value_norm);
  if (plan.image_score) {
    std::vector<float> scores;
    for (std::int64_t t = 0; t < n; ++t) scores.push_back(static_cast<float>(t * 7 % 11));
    out.put_image_score(layer, 0, scores);
  }
}

}  // namespace copying

// Writes the copy of sequence 0. What the source lacks is left out.
inline void copy_trace(const traces::reader& trace, const std::string& path,
                       const trace_copy& how) {
  auto model = trace.model();
  const auto& info = trace.sequence(0);
  if (how.rope) {
    model.rope = "half";
    model.rope_dim = model.head_dim;
    model.rope_inv_freq_rows = 1;
    for (int c = 0; c < model.head_dim / 2; ++c) model.rope_inv_freq.push_back(1.0 / (1 + 3 * c));
  }
  const auto wo_layers = std::exchange(model.wo_layers, {});
  traces::writer out(path, model, "test");
  if (how.wo) {
    for (const int layer : wo_layers) out.put_wo(layer, trace.wo(layer));
  }
  const auto& first = trace.layer(0, model.layers.front());
  traces::sequence_plan plan;
  plan.n_prompt = info.n_prompt;
  plan.n_tokens = info.n_tokens;
  plan.logit_pos = info.logit_pos;
  plan.confidence = how.confidence && info.has_confidence;
  plan.logits = how.logits && info.has_logits;
  plan.first_row = how.first_row;
  plan.o = plan.lse = false;
  plan.q = plan.kv = how.keys;
  plan.retention = how.retention && first.has_retention;
  plan.value_norm = how.value_norm && first.has_value_norm;
  plan.image_score = how.image_score;
  if (how.image_span) plan.spans["image"] = {{5, 25}};
  if (how.attention) {
    plan.attn_pos.resize(static_cast<size_t>(info.n_tokens));
    std::iota(plan.attn_pos.begin(), plan.attn_pos.end(), 0);
  }
  out.begin_sequence(plan);
  out.put_tokens(0, trace.tokens(0));
  if (plan.confidence) {
    auto rows = trace.confidence(0);
    for (size_t r = 0; r < info.logit_pos.size(); ++r) {
      if (info.logit_pos[r] >= how.changed_from) rows[4 * r] *= 0.5F;
    }
    out.put_confidence(0, rows);
  }
  if (plan.logits) {
    out.put_logits(0, trace.logits(0, 0, std::ssize(info.logit_pos)));
  }
  for (const int layer : model.layers) copying::copy_layer(trace, layer, how, plan, out);
  out.commit(info.n_tokens);
  out.end_sequence();
  out.finish();
}

}  // namespace kvreplay::replay
