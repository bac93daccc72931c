// One row of a report: what one policy cost and lost on one sequence. A plain struct that every
// writer walks in the same order. What was not measured is empty, with the reason in `note`.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "reports/details.hpp"

namespace kvreplay::reports {

using maybe = std::optional<double>;

// A file that cannot be read or written as a report: one line naming file and key, found, expected.
class report_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct named_value {
  std::string name;
  maybe value;
};

struct result {
  std::string trace, trace_fingerprint;
  int sequence = 0;
  std::string layers;  // "30/30", "4/30"
  std::string policy;  // resolved
  std::string name, precision, mode = "open", status = "ok", note;
  std::string gap_reference;  // what gap_closed compares with; empty: nothing
  std::vector<std::pair<std::string, std::string>> params;
  std::int64_t seed = 0;

  struct {
    std::int64_t prompt = 0, decoded = 0, scored = 0;
  } tokens;

  struct {
    maybe mean_bytes, peak_bytes, final_bytes, prefill_peak_bytes, reserved_bytes, full_mean_bytes,
        full_peak_bytes, memory_ratio, peak_ratio, mean_entries, peak_entries, policy_state_bytes;
  } memory;

  struct {
    maybe attention_recall, recall_bound, output_rel_l2, output_rel_l2_p95, output_rel_l2_pooled,
        output_cosine, residual_rel_l2, direct_kl, direct_nll, kl_proxy, output_l1, head_l1,
        sigma_over_half, heads_improved, evidence_mass, evidence_kept, evidence_gain, ppl, full_ppl,
        ppl_delta, logit_kl, logit_kl_p50, logit_kl_p99, top1_agreement, gap_closed,
        gap_closed_streaming, answer_nll, answer_accuracy, full_answer_nll, full_answer_accuracy,
        free_agreement, free_prefix;
    // Metrics whose names depend on the trace: kept_share.<span>. In name order.
    std::vector<named_value> more;
  } quality;
  std::map<std::string, std::pair<double, double>> quality_ci;  // 95 %

  struct {
    maybe mean, low_share, loose_share, tau;
  } confidence;
  struct {
    maybe evicted, selections, quantised, requantised, clipped, kept_turnover, passes;
  } events;
  struct {
    maybe wall_s, steps_per_s, attend_us_p50, attend_us_p99;
    // kvreplay time
    maybe batch, samples, step_us_p50, step_us_p99, append_us_p50, update_scores_us_p50,
        select_us_p50, select_us_p99, age_us_p50, attend_bytes_per_s, copy_bytes_per_s,
        memory_copy_bytes_per_s, short_launch_share, compaction_us_mean, attend_saved_us_mean,
        net_saved_us_mean, full_step_us_p50, speedup;
  } time;

  // --match-bytes: the factor applied to every budget, and the difference left.
  maybe budget_factor, match_difference;
  // sweep and tune. pareto: 1 where no other row is better in both bytes and the chosen quality.
  // sequences: how many rows an aggregated row (sequence -1) is the mean of.
  maybe pareto, sequences;

  // What charts are drawn from; rows may lack it.
  std::optional<row_details> details;
};

struct tool_info {
  std::string version, revision, device, hdf5, cuda, command, compiler, cpu;
  int threads = 1;
};

struct report {
  tool_info tool;
  std::vector<result> runs;
};

// Calls visit(section, name, maybe&) for every number, in the order of results.json; sections are
// "tokens" (as numbers), "memory", "quality" (`more` last), "confidence", "events", "time",
// "match", "sweep". Section and name are string_views. Const and mutable: with a mutable row, a
// visitor that empties a count of `tokens` sets it to 0. Writers and the comparison are written
// over this walk, never field by field.
template <typename Result, typename Visitor>
void for_each_number(Result& r, Visitor&& visit);

// A copy in which every number is finite: others are emptied (intervals: left out) and named in
// `note`; of `details` they are left out. What every writer of this folder writes.
result finite(const result& r);

// Differences in anything but `time` and `tool`; empty = equal. Used by every test that says "the
// same output". Texts name run and field. `details` are compared where both rows have them: files
// may leave them out.
std::vector<std::string> differences(const report& a, const report& b);

}  // namespace kvreplay::reports

#include "reports/result_walk.hpp"
