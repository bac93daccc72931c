// The one list of the numbers of a row: names and order of results.json. Included by result.hpp.
#pragma once

#include <cmath>
#include <initializer_list>
#include <string_view>
#include <type_traits>
#include <utility>

#include "reports/result.hpp"

namespace kvreplay::reports::detail {

template <typename Maybe>
using named_numbers = std::initializer_list<std::pair<std::string_view, Maybe*>>;

template <typename Maybe, typename Visitor>
void visit_all(std::string_view section, named_numbers<Maybe> numbers, Visitor& visit) {
  for (const auto& [name, value] : numbers) visit(section, name, *value);
}

template <typename Integer, typename Visitor>
void visit_count(std::string_view name, Integer& count, Visitor& visit) {
  using number = std::conditional_t<std::is_const_v<Integer>, const maybe, maybe>;
  const double before = static_cast<double>(count);
  number value = before;
  visit(std::string_view("tokens"), name, value);
  if constexpr (!std::is_const_v<Integer>) {
    if (value != before) count = value ? std::llround(*value) : 0;
  }
}

template <typename Maybe, typename Quality, typename Visitor>
void visit_quality(Quality& q, Visitor& visit) {
  visit_all<Maybe>("quality",
                   {{"attention_recall", &q.attention_recall},
                    {"recall_bound", &q.recall_bound},
                    {"output_rel_l2", &q.output_rel_l2},
                    {"output_rel_l2_p95", &q.output_rel_l2_p95},
                    {"output_rel_l2_pooled", &q.output_rel_l2_pooled},
                    {"output_cosine", &q.output_cosine},
                    {"residual_rel_l2", &q.residual_rel_l2},
                    {"direct_kl", &q.direct_kl},
                    {"direct_nll", &q.direct_nll},
                    {"kl_proxy", &q.kl_proxy},
                    {"output_l1", &q.output_l1},
                    {"head_l1", &q.head_l1},
                    {"sigma_over_half", &q.sigma_over_half},
                    {"heads_improved", &q.heads_improved},
                    {"evidence_mass", &q.evidence_mass},
                    {"evidence_kept", &q.evidence_kept},
                    {"evidence_gain", &q.evidence_gain},
                    {"ppl", &q.ppl},
                    {"full_ppl", &q.full_ppl},
                    {"ppl_delta", &q.ppl_delta},
                    {"logit_kl", &q.logit_kl},
                    {"logit_kl_p50", &q.logit_kl_p50},
                    {"logit_kl_p99", &q.logit_kl_p99},
                    {"top1_agreement", &q.top1_agreement},
                    {"gap_closed", &q.gap_closed},
                    {"gap_closed_streaming", &q.gap_closed_streaming},
                    {"answer_nll", &q.answer_nll},
                    {"answer_accuracy", &q.answer_accuracy},
                    {"full_answer_nll", &q.full_answer_nll},
                    {"full_answer_accuracy", &q.full_answer_accuracy},
                    {"free_agreement", &q.free_agreement},
                    {"free_prefix", &q.free_prefix}},
                   visit);
  for (auto& [name, value] : q.more) visit(std::string_view("quality"), name, value);
}

template <typename Maybe, typename Memory, typename Visitor>
void visit_memory(Memory& m, Visitor& visit) {
  visit_all<Maybe>("memory",
                   {{"mean_bytes", &m.mean_bytes},
                    {"peak_bytes", &m.peak_bytes},
                    {"final_bytes", &m.final_bytes},
                    {"prefill_peak_bytes", &m.prefill_peak_bytes},
                    {"reserved_bytes", &m.reserved_bytes},
                    {"full_mean_bytes", &m.full_mean_bytes},
                    {"full_peak_bytes", &m.full_peak_bytes},
                    {"memory_ratio", &m.memory_ratio},
                    {"peak_ratio", &m.peak_ratio},
                    {"mean_entries", &m.mean_entries},
                    {"peak_entries", &m.peak_entries},
                    {"policy_state_bytes", &m.policy_state_bytes}},
                   visit);
}

}  // namespace kvreplay::reports::detail

namespace kvreplay::reports {

template <typename Result, typename Visitor>
void for_each_number(Result& r, Visitor&& visit) {
  using number = std::conditional_t<std::is_const_v<Result>, const maybe, maybe>;
  detail::visit_count("prompt", r.tokens.prompt, visit);
  detail::visit_count("decoded", r.tokens.decoded, visit);
  detail::visit_count("scored", r.tokens.scored, visit);
  detail::visit_memory<number>(r.memory, visit);
  detail::visit_quality<number>(r.quality, visit);
  auto& c = r.confidence;
  detail::visit_all<number>("confidence",
                            {{"mean", &c.mean},
                             {"low_share", &c.low_share},
                             {"loose_share", &c.loose_share},
                             {"tau", &c.tau}},
                            visit);
  auto& e = r.events;
  detail::visit_all<number>("events",
                            {{"evicted", &e.evicted},
                             {"selections", &e.selections},
                             {"quantised", &e.quantised},
                             {"requantised", &e.requantised},
                             {"clipped", &e.clipped},
                             {"kept_turnover", &e.kept_turnover},
                             {"passes", &e.passes}},
                            visit);
  auto& t = r.time;
  detail::visit_all<number>("time",
                            {{"wall_s", &t.wall_s},
                             {"steps_per_s", &t.steps_per_s},
                             {"attend_us_p50", &t.attend_us_p50},
                             {"attend_us_p99", &t.attend_us_p99},
                             {"batch", &t.batch},
                             {"samples", &t.samples},
                             {"step_us_p50", &t.step_us_p50},
                             {"step_us_p99", &t.step_us_p99},
                             {"append_us_p50", &t.append_us_p50},
                             {"update_scores_us_p50", &t.update_scores_us_p50},
                             {"select_us_p50", &t.select_us_p50},
                             {"select_us_p99", &t.select_us_p99},
                             {"age_us_p50", &t.age_us_p50},
                             {"attend_bytes_per_s", &t.attend_bytes_per_s},
                             {"copy_bytes_per_s", &t.copy_bytes_per_s},
                             {"memory_copy_bytes_per_s", &t.memory_copy_bytes_per_s},
                             {"short_launch_share", &t.short_launch_share},
                             {"compaction_us_mean", &t.compaction_us_mean},
                             {"attend_saved_us_mean", &t.attend_saved_us_mean},
                             {"net_saved_us_mean", &t.net_saved_us_mean},
                             {"full_step_us_p50", &t.full_step_us_p50},
                             {"speedup", &t.speedup}},
                            visit);
  detail::visit_all<number>(
      "match", {{"budget_factor", &r.budget_factor}, {"match_difference", &r.match_difference}},
      visit);
  detail::visit_all<number>("sweep", {{"pareto", &r.pareto}, {"sequences", &r.sequences}}, visit);
}

}  // namespace kvreplay::reports
