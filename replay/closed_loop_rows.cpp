#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "replay/closed_loop_pass.hpp"
#include "replay/row_details.hpp"
#include "reports/bootstrap.hpp"

namespace kvreplay::replay {
namespace {

using scores_span = std::span<const logit_score>;

double mean(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double nearest_rank(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double rank = std::max(1.0, std::ceil(share * static_cast<double>(values.size())));
  return values[static_cast<size_t>(rank) - 1];
}

template <class Field>
std::vector<double> column(scores_span scores, Field field) {
  std::vector<double> out;
  for (const auto& s : scores) out.push_back(static_cast<double>(field(s)));
  return out;
}

void store_interval(const char* name, const std::vector<double>& values, reports::result& row,
                    double (*map)(double) = nullptr) {
  if (auto interval = reports::bootstrap_mean({&values, 1})) {
    if (map != nullptr) interval = {map(interval->first), map(interval->second)};
    row.quality_ci[name] = *interval;
  }
}

// Mean NLL over the tokens of spans, and the share of spans that are argmax all along.
struct answers {
  double nll = 0, hits = 0;
  std::int64_t tokens = 0, spans = 0;
};

// Spans that begin in the prompt, or end beyond the text, are left out. scores from P-1 on.
answers score_answers(const std::vector<std::pair<int, int>>& spans, std::int64_t n_prompt,
                      std::int64_t n_tokens, scores_span scores) {
  answers out;
  for (const auto& [begin, end] : spans) {
    if (begin < n_prompt || end > n_tokens || begin >= end) continue;
    bool all = true;
    for (std::int64_t p = begin; p < end; ++p) {
      const auto& before = scores[static_cast<size_t>(p - n_prompt)];
      out.nll += before.nll;
      all = all && before.hit;
      ++out.tokens;
    }
    out.hits += all ? 1 : 0;
    ++out.spans;
  }
  return out;
}

}  // namespace

void closed_loop_pass::finish(size_t index, lane_output& out) const {
  auto& row = out.row;
  const closed_lane* lane = lanes_[index].get();
  const auto& scores = lane == nullptr ? full_scores_ : lane->scores();
  if (free()) {
    finish_free(index, row);
  } else {
    finish_quality(scores, row);
    finish_answers(scores, row);
  }
  finish_memory(lane, out);
  if (lane != nullptr) {
    finish_confidence(lane->state().policy(), lane->gate().tau, scores, row);
    row.events.passes = lane->passes_per_block();
    row.time.wall_s = lane->seconds;
    if (lane->seconds > 0) {
      row.time.steps_per_s = static_cast<double>(info_.n_decode()) / lane->seconds;
    }
    if (lane->state().policy().needs.future) add_note(row, "reads the future of the recorded run");
    if (lane->state().policy().trigger.prefill_only) {
      add_note(row, "selects after the prompt only: the cache then grows without limit");
    }
  } else {
    finish_confidence({}, 0, scores, row);
  }
  if (options_.kv_fp32) add_note(row, fp32_note);
  if (!recorded_kl_.empty()) {
    const double sum = std::accumulate(recorded_kl_.begin(), recorded_kl_.end(), 0.0);
    add_note(row, fmt::format("full against the recorded logits: KL {:.2g} nats",
                              sum / static_cast<double>(recorded_kl_.size())));
  }
}

void closed_loop_pass::finish_memory(const closed_lane* lane, lane_output& out) const {
  std::vector<std::int64_t> full;
  for (std::int64_t t = info_.n_prompt; t < info_.n_tokens; ++t) {
    full.push_back(full_bytes(shape_, t + 1));
  }
  reduce_context context;
  context.q_heads = shape_.q_heads;
  context.kv_heads = shape_.kv_heads;
  context.skip = options_.skip;
  context.full_bytes = full;
  auto& row = out.row;
  row.memory.prefill_peak_bytes = static_cast<double>(full_bytes(shape_, info_.n_prompt));
  out.layers = layers_;
  if (lane == nullptr) {
    const auto measures = full_measures();
    reduce_measures(measures, context, row);
    row.time.attend_us_p50 = row.time.attend_us_p99 = std::nullopt;
    row.memory.final_bytes = static_cast<double>(full_bytes(shape_, info_.n_tokens));
    if (options_.kept) out.dropped = full_dropped();
    finish_steps(measures, full_scores_, out);
    finish_details(measures, full_scores_, full, row);
    return;
  }
  context.loose_entries =
      loose_entries(lane->state().policy(), lane->state().plan(), layers_, info_.n_tokens - 1);
  reduce_measures(lane->measures(), context, row);
  const auto& cache = lane->state().cache();
  row.memory.final_bytes = static_cast<double>(cache.payload_bytes());
  row.memory.reserved_bytes = static_cast<double>(cache.reserved_bytes());
  if (cache.format().body != kernels::body_format::none) {
    const auto events = cache.events();
    row.events.quantised = static_cast<double>(events.quantised);
    row.events.requantised = static_cast<double>(events.requantised);
    row.events.clipped = static_cast<double>(events.clipped);
  }
  out.dropped = lane->kept().dropped();
  finish_steps(lane->measures(), lane->scores(), out);
  finish_details(lane->measures(), lane->scores(), full, row);
}

void closed_loop_pass::finish_details(const lane_measures& measures, scores_span scores,
                                      std::span<const std::int64_t> full,
                                      reports::result& row) const {
  if (!options_.details || scores.empty()) return;
  const auto c = column(scores.subspan(1), [](const auto& s) { return s.confidence; });
  row.details = step_details(measures, shape_.kv_heads, info_, full, c, options_.skip);
}

// NLL over the positions P .. T-2, whose next token is known; KL and top-1 over P .. T-1.
void closed_loop_pass::finish_quality(scores_span scores, reports::result& row) const {
  const auto first = static_cast<size_t>(1 + options_.skip);
  if (scores.size() <= first) return;
  const scores_span all = scores.subspan(first);
  const auto kl = column(all, [](const auto& s) { return s.kl; });
  const auto top1 = column(all, [](const auto& s) { return s.top1 ? 1 : 0; });
  auto& q = row.quality;
  q.logit_kl = mean(kl);
  q.logit_kl_p50 = nearest_rank(kl, 0.5);
  q.logit_kl_p99 = nearest_rank(kl, 0.99);
  q.top1_agreement = mean(top1);
  store_interval("logit_kl", kl, row);
  store_interval("top1_agreement", top1, row);
  row.tokens.scored = std::ssize(all) - 1;
  if (all.size() < 2) return;
  const auto nll_of = [](const auto& s) { return s.nll; };
  const auto nll = column(all.first(all.size() - 1), nll_of);
  const auto full = column(scores_span(full_scores_).subspan(first, all.size() - 1), nll_of);
  q.ppl = std::exp(mean(nll));
  q.full_ppl = std::exp(mean(full));
  q.ppl_delta = *q.ppl - *q.full_ppl;
  store_interval("ppl", nll, row, [](double x) { return std::exp(x); });
}

// The texts after the prompt, the token that the prompt itself gave included.
void closed_loop_pass::finish_free(size_t index, reports::result& row) const {
  add_note(row, free_run_note(options_.free));
  const auto& own = lanes_[index] == nullptr ? tokens_ : texts_[index];
  std::int64_t same = 0, prefix = -1;
  for (std::int64_t i = 0; i < options_.free.tokens; ++i) {
    const auto at = static_cast<size_t>(info_.n_prompt + i);
    same += own[at] == tokens_[at] ? 1 : 0;
    if (prefix < 0 && own[at] != tokens_[at]) prefix = i;
  }
  row.quality.free_agreement =
      static_cast<double>(same) / static_cast<double>(options_.free.tokens);
  row.quality.free_prefix = static_cast<double>(prefix < 0 ? options_.free.tokens : prefix);
}

void closed_loop_pass::finish_answers(scores_span scores, reports::result& row) const {
  const auto spans = info_.spans.find("answer");
  if (spans == info_.spans.end()) return;
  const auto own = score_answers(spans->second, info_.n_prompt, info_.n_tokens, scores);
  const auto full = score_answers(spans->second, info_.n_prompt, info_.n_tokens, full_scores_);
  if (own.tokens == 0) {
    add_note(row, "answer metrics not measured: no span `answer` lies behind the prompt");
    return;
  }
  auto& q = row.quality;
  q.answer_nll = own.nll / static_cast<double>(own.tokens);
  q.answer_accuracy = own.hits / static_cast<double>(own.spans);
  q.full_answer_nll = full.nll / static_cast<double>(full.tokens);
  q.full_answer_accuracy = full.hits / static_cast<double>(full.spans);
  if (*q.answer_nll < *q.full_answer_nll) add_note(row, "beats full on the answers");
}

void closed_loop_pass::finish_confidence(const policies::policy& policy, double tau,
                                         scores_span scores, reports::result& row) const {
  const auto first = static_cast<size_t>(1 + options_.skip);
  if (scores.size() <= first) return;
  const auto c = column(scores.subspan(first), [](const auto& s) { return s.confidence; });
  row.confidence.mean = mean(c);
  if (!policy.budget.gated) return;
  const auto low = std::count_if(c.begin(), c.end(), [&](double x) { return x < tau; });
  row.confidence.low_share = static_cast<double>(low) / static_cast<double>(c.size());
  row.confidence.tau = tau;
}

void closed_loop_pass::finish_steps(const lane_measures& m, scores_span scores,
                                    lane_output& out) const {
  const double heads = static_cast<double>(m.layers_count) * shape_.kv_heads;
  for (std::int64_t t = 0; options_.per_step && t < m.step_count; ++t) {
    reports::step_row row;
    row.key = {out.row.trace, out.row.policy, out.row.mode, out.row.sequence};
    row.step = info_.n_prompt + t;
    double bytes = 0, entries = 0, budget = 0;
    bool limited = true;
    for (int l = 0; l < m.layers_count; ++l) {
      const auto& at = m.at(l, t);
      bytes += static_cast<double>(at.bytes);
      entries += static_cast<double>(at.entries) / heads;
      budget += static_cast<double>(at.budget) / heads;
      limited = limited && at.budget >= 0;
    }
    row.bytes = bytes;
    row.entries = entries;
    if (limited) row.budget = budget;
    row.confidence = scores[static_cast<size_t>(t + 1)].confidence;
    out.steps.push_back(row);
  }
}

// What the reference holds needs no cache to be known.
lane_measures closed_loop_pass::full_measures() const {
  lane_measures out(shape_.layers, info_.n_decode(), shape_.kv_heads, 0);
  for (int slot = 0; slot < shape_.layers; ++slot) {
    for (std::int64_t t = 0; t < info_.n_decode(); ++t) {
      const std::int64_t window = shape_.window_of(slot), seen = info_.n_prompt + t + 1;
      const std::int64_t entries = (window > 0 ? std::min(window, seen) : seen) * shape_.kv_heads;
      auto& at = out.at(slot, t);
      at.entries = static_cast<std::int32_t>(entries);
      at.bytes = entries * (shape_.head_dim + shape_.value_dim) * 2;
    }
  }
  return out;
}

// Only windows let go. After P-1 nothing has left that the last prompt row could see.
std::vector<std::vector<dropped_positions>> closed_loop_pass::full_dropped() const {
  std::vector<std::vector<dropped_positions>> out;
  for (int slot = 0; slot < shape_.layers; ++slot) {
    std::vector<dropped_positions> log;
    const std::int64_t window = shape_.window_of(slot);
    for (std::int64_t t = info_.n_prompt - 1; window > 0 && t < info_.n_tokens; ++t) {
      dropped_positions gone{t, {}};
      const std::int64_t begin =
          t == info_.n_prompt - 1 ? 0 : std::max<std::int64_t>(0, t - window);
      for (std::int64_t p = begin; p <= t - window; ++p) {
        gone.positions.push_back(static_cast<std::int32_t>(p));
      }
      if (!gone.positions.empty()) log.push_back(std::move(gone));
    }
    for (int head = 0; head < shape_.kv_heads; ++head) out.push_back(log);
  }
  return out;
}

}  // namespace kvreplay::replay
