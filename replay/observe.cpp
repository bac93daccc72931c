#include "replay/observe.hpp"

#include <algorithm>
#include <cmath>

#include "kernels/held_mass.hpp"

namespace kvreplay::replay {
std::int64_t span_mask::count_below(std::int64_t end) const {
  const auto last = member.begin() + std::min<std::ptrdiff_t>(end, std::ssize(member));
  return std::count(member.begin(), last, std::uint8_t{1});
}

void step_observation::operator()(const lane& lane, int slot, std::int64_t t, const float* o,
                                  const float* lse, lane_measures& out) {
  const bool exact_scores = lane.cache().format().body == kernels::body_format::none;
  if (parts_.recall) {
    for (int g = 0; g < shape_->kv_heads; ++g) {
      measure_recall(lane.cache().head(slot, g), slot, g, t, lse, exact_scores, out);
      if (reference_->has_rows() && t - data_->n_prompt >= skip_) measure_spans(slot, g, t, out);
    }
  }
  if (parts_.output) measure_output(slot, t, o, out);
}

void step_observation::measure_recall(const kernels::head_store& store, int slot, int kv_head,
                                      std::int64_t t, const float* lse, bool exact_scores,
                                      lane_measures& out) {
  positions_.assign(store.body_position.begin(), store.body_position.end());
  positions_.insert(positions_.end(), store.tail_position.begin(), store.tail_position.end());
  auto& at = out.at(slot, t - data_->n_prompt);
  find_kept_mass(t, kv_head, lse, exact_scores);
  double recall = 0;
  for (int i = 0; i < shape_->group(); ++i) {
    const int h = kv_head * shape_->group() + i;
    const double visible = visible_mass(t, h);
    // A learned sink that takes everything leaves nothing to recall.
    if (!(visible > 0)) {
      recall += 1;
      at.bound_sum += 1;
      continue;
    }
    recall += kept_[static_cast<size_t>(i)] / visible;
    if (parts_.bound) {
      at.bound_sum += reference_->best(t, h, std::ssize(positions_)) / visible;
    }
  }
  at.recall_sum += recall;
  if (t - data_->n_prompt < skip_) return;
  auto& head = out.heads[static_cast<size_t>(slot * shape_->kv_heads + kv_head)];
  head.entries += static_cast<double>(positions_.size());
  head.recall += recall / shape_->group();
}

// Sums of A over the held positions, per query head of the group. With whole rows at hand they are
// read off them. Without, an unquantised cache has the very scores of the trace, so its own
// log-sum-exp gives the sum; a quantised one does not, and the scores are taken from the trace's
// keys.
void step_observation::find_kept_mass(std::int64_t t, int kv_head, const float* lse,
                                      bool exact_scores) {
  const int group = shape_->group(), first = kv_head * group;
  kept_.assign(static_cast<size_t>(group), 0.0);
  if (!reference_->has_rows() && !exact_scores) {
    const float* q = data_->q_at(t) + std::int64_t{first} * shape_->head_dim;
    const float* k = data_->k.data() + std::int64_t{kv_head} * shape_->head_dim;
    lse_.clear();
    for (int i = 0; i < group; ++i) lse_.push_back(reference_->lse(t, first + i));
    kernels::held_mass(q, group, shape_->head_dim, static_cast<float>(shape_->softmax_scale), k,
                       data_->k_width, positions_, lse_.data(), kept_.data());
    return;
  }
  for (int i = 0; i < group; ++i) {
    double& sum = kept_[static_cast<size_t>(i)];
    if (reference_->has_rows()) {
      const float* row = reference_->row(t, first + i).data();
      for (const std::int32_t p : positions_) sum += row[p];
      continue;
    }
    const double full = reference_->lse(t, first + i);
    sum = std::exp(static_cast<double>(lse[first + i]) - full);
    if (shape_->sink_logits.empty()) continue;
    sum -=
        std::exp(static_cast<double>(shape_->sink_logits[static_cast<size_t>(first + i)]) - full);
  }
}

double step_observation::visible_mass(std::int64_t t, int q_head) const {
  if (reference_->has_rows()) return reference_->total(t, q_head);
  if (shape_->sink_logits.empty()) return 1;
  const double sink = shape_->sink_logits[static_cast<size_t>(q_head)];
  return 1 - std::exp(sink - static_cast<double>(reference_->lse(t, q_head)));
}

void step_observation::measure_spans(int slot, int kv_head, std::int64_t t, lane_measures& out) {
  for (size_t s = 0; s < spans_.size(); ++s) {
    const auto& member = spans_[s].member;
    auto& at = out.spans[static_cast<size_t>(slot) * spans_.size() + s];
    for (int i = 0; i < shape_->group(); ++i) {
      const auto row = reference_->row(t, kv_head * shape_->group() + i);
      for (size_t p = 0; p < row.size(); ++p) at.mass += member[p] != 0 ? row[p] : 0.0F;
      for (const std::int32_t p : positions_) {
        const double a = row[static_cast<size_t>(p)];
        at.all_kept_mass += a;
        if (member[static_cast<size_t>(p)] != 0) at.kept_mass += a;
      }
      ++at.mass_rows;
    }
    const auto total = spans_[s].count_below(t + 1);
    if (total == 0) continue;
    const auto held = std::count_if(positions_.begin(), positions_.end(), [&](std::int32_t p) {
      return member[static_cast<size_t>(p)] != 0;
    });
    at.share_kept += static_cast<double>(held) / static_cast<double>(total);
    ++at.share_rows;
  }
}

void step_observation::measure_output(int slot, std::int64_t t, const float* o,
                                      lane_measures& out) const {
  const float* reference = reference_->o(t);
  auto& at = out.at(slot, t - data_->n_prompt);
  const int width = shape_->group() * shape_->value_dim;
  for (int g = 0; g < shape_->kv_heads; ++g) {
    double error2 = 0, reference2 = 0, output2 = 0, dot = 0;
    for (int c = g * width; c < (g + 1) * width; ++c) {
      const double x = o[c], y = reference[c];
      error2 += (x - y) * (x - y);
      reference2 += y * y;
      output2 += x * x;
      dot += x * y;
    }
    at.error2 += error2;
    at.reference2 += reference2;
    at.output2 += output2;
    at.dot += dot;
    if (t - data_->n_prompt < skip_) continue;
    auto& head = out.heads[static_cast<size_t>(slot * shape_->kv_heads + g)];
    head.error2 += error2;
    head.reference2 += reference2;
  }
}

}  // namespace kvreplay::replay
