#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

#include "replay/open_loop_pass.hpp"
#include "replay/row_basics.hpp"
#include "replay/row_details.hpp"

namespace kvreplay::replay {
namespace {

// The span that the evidence metrics are about: `needle` where the trace has it, else `answer`,
// else the first by name.
size_t evidence_span(const std::vector<std::string>& names) {
  for (const char* preferred : {"needle", "answer"}) {
    const auto at = std::find(names.begin(), names.end(), preferred);
    if (at != names.end()) return static_cast<size_t>(at - names.begin());
  }
  return 0;
}

}  // namespace

reduce_context open_loop_pass::context_for(const running_lane& lane) const {
  reduce_context context;
  context.q_heads = model_.n_q_heads;
  context.kv_heads = model_.n_kv_heads;
  context.skip = options_.skip;
  context.parts = parts_;
  context.residual_norm = residual_norm_;
  context.loose_entries =
      loose_entries(lane.state.policy(), lane.state.plan(), layers_, info_.n_tokens - 1);
  return context;
}

void open_loop_pass::finish(const running_lane& lane, lane_output& out) const {
  auto& row = out.row;
  const auto& cache = lane.state.cache();
  std::vector<std::int64_t> full;
  for (std::int64_t t = info_.n_prompt; t < info_.n_tokens; ++t)
    full.push_back(full_bytes(shape_, t + 1));
  auto context = context_for(lane);
  context.full_bytes = full;
  reduce_measures(lane.measures, context, row);
  row.memory.final_bytes = static_cast<double>(cache.payload_bytes());
  row.memory.prefill_peak_bytes = static_cast<double>(full_bytes(shape_, info_.n_prompt));
  row.memory.reserved_bytes =
      static_cast<double>(lane.device ? lane.device->reserved_bytes() : cache.reserved_bytes());
  const auto events = cache.events();
  if (cache.format().body != kernels::body_format::none) {
    row.events.quantised = static_cast<double>(events.quantised);
    row.events.requantised = static_cast<double>(events.requantised);
    row.events.clipped = static_cast<double>(events.clipped);
  }
  if (lane.confidence.size() > static_cast<size_t>(options_.skip) + 1) {
    const auto begin = lane.confidence.begin() + 1 + options_.skip;
    const auto n = static_cast<double>(lane.confidence.end() - begin);
    row.confidence.mean = std::accumulate(begin, lane.confidence.end(), 0.0) / n;
    if (lane.state.policy().budget.gated) {
      const auto low =
          std::count_if(begin, lane.confidence.end(), [&](double c) { return c < lane.tau; });
      row.confidence.low_share = static_cast<double>(low) / n;
      row.confidence.tau = lane.tau;
    }
  }
  const double seconds = std::accumulate(lane.seconds.begin(), lane.seconds.end(), 0.0);
  row.time.wall_s = seconds;
  if (seconds > 0) row.time.steps_per_s = static_cast<double>(info_.n_decode()) / seconds;
  if (lane.device != nullptr) {  // its layers attend together
    row.time.attend_us_p50 = row.time.attend_us_p99 = std::nullopt;
    add_note(row, "on the device: attention is not timed by layer");
  }
  if (!lane.host_note.empty()) add_note(row, lane.host_note);
  if (lane.state.policy().needs.future) add_note(row, "reads the future of the recorded run");
  if (lane.state.policy().trigger.prefill_only) {
    add_note(row, "selects after the prompt only: the cache then grows without limit");
  }
  if (!options_.bound) add_note(row, "recall_bound not measured: --no-bound");
  if (!parts_.residual) {
    add_note(row,
             "residual_rel_l2 not measured: the trace lacks wo or residual_norm "
             "(record --with wo,residual)");
  }
  if (!parts_.output && options_.quality) {
    add_note(row, "outputs not measured: the trace has attention alone, no q, k, v");
  }
  finish_spans(lane, row);
  finish_rows(lane, out);
  if (options_.details) {
    const auto c = std::span(lane.confidence);
    row.details = step_details(lane.measures, model_.n_kv_heads, info_, full,
                               c.empty() ? c : c.subspan(1), options_.skip);
    const std::int64_t scored = info_.n_decode() - options_.skip;
    if (options_.quality && scored > 0) {
      row.details->heads = head_details(lane.measures, layers_, model_.n_kv_heads, parts_, scored);
    }
  }
  out.layers = layers_;
  out.dropped = lane.kept.dropped();
}

// CriticalKV's measure: in how many (layer, query head) pairs the loss fell.
void open_loop_pass::finish_critical(size_t index, reports::result& row) const {
  const auto& policy = lanes_[index]->state.policy();
  if (!policy.critical.on) return;
  const auto base = policies::without_modifier(policy, "critical").resolved;
  for (size_t i = 0; i < policies_.size(); ++i) {
    if (policies_[i].resolved != base || lanes_[i] == nullptr) continue;
    const auto& with = lanes_[index]->measures.head_l1;
    const auto& without = lanes_[i]->measures.head_l1;
    std::int64_t better = 0;
    for (size_t h = 0; h < with.size(); ++h) better += with[h] < without[h] ? 1 : 0;
    row.quality.heads_improved = static_cast<double>(better) / static_cast<double>(with.size());
    return;
  }
}

void open_loop_pass::finish_spans(const running_lane& lane, reports::result& row) const {
  if (span_names_.empty()) return;
  const size_t evidence = evidence_span(span_names_);
  for (size_t s = 0; s < span_names_.size(); ++s) {
    span_measure sum;
    for (size_t l = 0; l < layers_.size(); ++l) {
      const auto& at = lane.measures.spans[l * span_names_.size() + s];
      sum.mass += at.mass;
      sum.kept_mass += at.kept_mass;
      sum.all_kept_mass += at.all_kept_mass;
      sum.share_kept += at.share_kept;
      sum.mass_rows += at.mass_rows;
      sum.share_rows += at.share_rows;
    }
    reports::maybe share;
    if (sum.share_rows > 0) share = sum.share_kept / static_cast<double>(sum.share_rows);
    row.quality.more.push_back({"kept_share." + span_names_[s], share});
    if (s != evidence || sum.mass_rows == 0) continue;
    const auto n = static_cast<double>(sum.mass_rows);
    row.quality.evidence_mass = sum.mass / n;
    if (sum.mass > 0) row.quality.evidence_kept = sum.kept_mass / sum.mass;
    if (sum.mass > 0 && sum.all_kept_mass > 0) {
      row.quality.evidence_gain = (sum.kept_mass / sum.mass) / (sum.all_kept_mass / n);
    }
    add_note(row, fmt::format("evidence metrics are of span `{}`", span_names_[s]));
  }
}

void open_loop_pass::finish_rows(const running_lane& lane, lane_output& out) const {
  const auto& m = lane.measures;
  const reports::row_key key{out.row.trace, out.row.policy, out.row.mode, out.row.sequence};
  const double head_count = static_cast<double>(layers_.size()) * model_.n_kv_heads;
  for (std::int64_t t = 0; options_.per_step && t < info_.n_decode(); ++t) {
    reports::step_row row;
    row.key = key;
    row.step = info_.n_prompt + t;
    double recall = 0, error = 0, budget = 0, bytes = 0, entries = 0;
    int error_count = 0;
    bool limited = true;
    for (int l = 0; l < m.layers_count; ++l) {
      const auto& at = m.at(l, t);
      bytes += static_cast<double>(at.bytes);
      entries += static_cast<double>(at.entries) / head_count;
      recall += at.recall_sum;
      budget += static_cast<double>(at.budget) / head_count;
      limited = limited && at.budget >= 0;
      if (at.reference2 > 0) {
        error += std::sqrt(at.error2 / at.reference2);
        ++error_count;
      }
    }
    row.bytes = bytes;
    row.entries = entries;
    if (limited) row.budget = budget;
    if (!lane.confidence.empty()) row.confidence = lane.confidence[static_cast<size_t>(t + 1)];
    if (parts_.recall) {
      row.attention_recall = recall / (static_cast<double>(m.layers_count) * model_.n_q_heads);
    }
    if (parts_.output && error_count > 0) row.output_rel_l2 = error / error_count;
    out.steps.push_back(row);
  }
  const auto scored = static_cast<double>(info_.n_decode() - options_.skip);
  for (size_t i = 0; options_.per_head && i < m.heads.size(); ++i) {
    const auto& at = m.heads[i];
    reports::head_row row;
    row.key = key;
    row.layer = layers_[i / static_cast<size_t>(model_.n_kv_heads)];
    row.kv_head = static_cast<int>(i % static_cast<size_t>(model_.n_kv_heads));
    row.mean_entries = at.entries / scored;
    if (parts_.recall) row.attention_recall = at.recall / scored;
    if (parts_.output && at.reference2 > 0) {
      row.output_rel_l2 = std::sqrt(at.error2 / at.reference2);
    }
    if (parts_.projected) row.head_l1 = at.l1 / (scored * model_.group());
    out.heads.push_back(row);
  }
}

void for_each_kept_set(
    const traces::reader& trace, int sequence, const lane_output& lane,
    const std::function<void(std::int64_t step, int layer, int kv_head,
                             const std::vector<std::int32_t>& positions)>& visit) {
  const auto& info = trace.sequence(sequence);
  const auto heads = static_cast<size_t>(trace.model().n_kv_heads);
  std::vector<std::vector<std::int32_t>> held(lane.dropped.size());
  std::vector<size_t> next(lane.dropped.size(), 0);
  std::vector<std::int32_t> rest;
  for (std::int64_t step = info.n_prompt - 1; step < info.n_tokens; ++step) {
    for (size_t i = 0; i < held.size(); ++i) {
      const std::int64_t newcomers = step == info.n_prompt - 1 ? 0 : step;
      for (std::int64_t t = newcomers; t <= step; ++t) {
        held[i].push_back(static_cast<std::int32_t>(t));
      }
      const auto& events = lane.dropped[i];
      if (next[i] < events.size() && events[next[i]].step == step) {
        const auto& gone = events[next[i]++].positions;
        rest.clear();
        std::set_difference(held[i].begin(), held[i].end(), gone.begin(), gone.end(),
                            std::back_inserter(rest));
        held[i].swap(rest);
      }
      visit(step, lane.layers[i / heads], static_cast<int>(i % heads), held[i]);
    }
  }
}

}  // namespace kvreplay::replay
