#include "replay/observe.hpp"

#include <algorithm>
#include <cmath>

namespace kvreplay::replay {
namespace {

// In double, in eight independent sums: one chain of additions would wait for each of them.
double dot(const float* a, const float* b, size_t n) {
  constexpr size_t lanes = 8;
  double sums[lanes] = {};
  size_t c = 0;
  for (; c + lanes <= n; c += lanes) {
    for (size_t j = 0; j < lanes; ++j) sums[j] += static_cast<double>(a[c + j]) * b[c + j];
  }
  double total = 0;
  for (; c < n; ++c) total += static_cast<double>(a[c]) * b[c];
  for (const double s : sums) total += s;
  return total;
}

}  // namespace

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
    recall += kept_mass(t, h, kv_head, lse, exact_scores) / visible;
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

// Sum of A over the held positions. With whole rows at hand it is read off them. Without, an
// unquantised cache has the very scores of the trace, so its own log-sum-exp gives the sum; a
// quantised one does not, and the scores are taken from the trace's keys.
double step_observation::kept_mass(std::int64_t t, int q_head, int kv_head, const float* lse,
                                   bool exact_scores) {
  if (reference_->has_rows()) {
    const float* row = reference_->row(t, q_head).data();
    double sum = 0;
    for (const std::int32_t i : positions_) sum += row[i];
    return sum;
  }
  const double full = reference_->lse(t, q_head);
  if (exact_scores) {
    double sum = std::exp(static_cast<double>(lse[q_head]) - full);
    if (!shape_->sink_logits.empty()) {
      sum -= std::exp(static_cast<double>(shape_->sink_logits[static_cast<size_t>(q_head)]) - full);
    }
    return sum;
  }
  const auto dim = static_cast<size_t>(shape_->head_dim);
  const float* q = data_->q_at(t) + static_cast<size_t>(q_head) * dim;
  double sum = 0;
  for (const std::int32_t i : positions_) {
    const float* k = data_->k_at(i) + static_cast<size_t>(kv_head) * dim;
    sum += std::exp(shape_->softmax_scale * dot(q, k, dim) - full);
  }
  return sum;
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
