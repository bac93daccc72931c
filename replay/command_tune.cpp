#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "policies/params.hpp"
#include "replay/commands.hpp"
#include "replay/device_choice.hpp"
#include "replay/labels.hpp"
#include "replay/output_files.hpp"
#include "replay/progress.hpp"
#include "replay/ranks.hpp"
#include "replay/row_lines.hpp"
#include "replay/sweep.hpp"
#include "replay/text.hpp"
#include "replay/tune.hpp"
#include "reports/aggregate.hpp"
#include "reports/atomic_file.hpp"
#include "reports/pareto.hpp"
#include "reports/table.hpp"
#include "tracer/model.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

constexpr std::size_t shown_rows = 5;  // and as many are checked on the holdout traces

tune_goal goal_of(const tune_command& command) {
  tune_goal goal;
  int given = 0;
  const auto set = [&](const std::optional<double>& value, tune_limit limit) {
    if (!value) return;
    ++given;
    goal.limit = limit;
    goal.value = *value;
  };
  if (!command.max_bytes.empty()) {
    policies::param_reader reader("tune", {{"--max-bytes", command.max_bytes}});
    const auto amount = reader.size("--max-bytes", std::nullopt, "");
    if (amount.unit == policies::amount_unit::percent) {
      throw usage_error("--max-bytes: expected bytes, such as 64MiB; shares are --max-ratio's");
    }
    set(amount.value, tune_limit::max_bytes);
  }
  set(command.max_ratio, tune_limit::max_ratio);
  set(command.min_recall, tune_limit::min_recall);
  set(command.max_kl, tune_limit::max_kl);
  if (given != 1) {
    throw usage_error("tune needs one limit: --max-bytes, --max-ratio, --min-recall or --max-kl");
  }
  if (command.max_kl && command.model_directory.empty()) {
    throw usage_error("--max-kl is measured with the model in the loop: give --model DIR");
  }
  return goal;
}

std::string interval_text(const reports::result& row, std::string_view metric) {
  const auto at = row.quality_ci.find(std::string(metric));
  if (at == row.quality_ci.end()) return "";
  return fmt::format(" [{}, {}]", reports::four_digits(at->second.first),
                     reports::four_digits(at->second.second));
}

// What stands beside the metric that was tuned.
std::string second_loss(const reports::result& row) {
  if (row.quality.attention_recall) {
    return fmt::format(", attention recall {}{}",
                       reports::four_digits(*row.quality.attention_recall),
                       interval_text(row, "attention_recall"));
  }
  if (!row.quality.ppl || !row.quality.full_ppl) return "";
  return fmt::format(", perplexity {} ({} with the full cache)",
                     reports::four_digits(*row.quality.ppl),
                     reports::four_digits(*row.quality.full_ppl));
}

class tune_command_run {
 public:
  tune_command_run(const common_options& common, const tune_command& command)
      : common_(common), command_(command), goal_(goal_of(command)), root_(this_rank().rank == 0) {
    for (const auto& spec : command.policies) grids_.emplace_back(spec);
  }
  int run();

 private:
  std::vector<reports::result> evaluate(std::span<const std::string> traces,
                                        std::span<const std::string> specs, double share,
                                        bool closed) const;
  std::vector<reports::result> evaluate_once(std::span<const std::string> specs, double share);
  std::string quality_of_traces() const;
  std::int64_t shortest_decode() const;
  void print(const tuned& found, std::span<const reports::result> holdout,
             std::span<const reports::result> checks) const;
  std::string sureness(const tuned& found) const;

  const common_options& common_;
  const tune_command& command_;
  tune_goal goal_;
  bool root_;
  std::unique_ptr<kernels::compute_device> device_;  // null: the CPU
  std::optional<tracer::model> model_;
  std::map<std::string, reports::result> looped_;  // closed-loop rows of the search, by SPEC
  std::vector<policies::spec_grid> grids_;
};

std::int64_t tune_command_run::shortest_decode() const {
  std::int64_t shortest = std::numeric_limits<std::int64_t>::max();
  for (const auto& path : command_.traces) {
    const traces::reader trace(path);
    for (const auto& s : trace.sequences()) shortest = std::min(shortest, s.n_decode());
  }
  return shortest;
}

// One row per SPEC: its own where there is one sequence, else the mean over sequences; failed where
// any of them failed. The same rows on every rank.
std::vector<reports::result> tune_command_run::evaluate(std::span<const std::string> traces,
                                                        std::span<const std::string> specs,
                                                        double share, bool closed) const {
  std::vector<sweep_point> points;
  for (const auto& spec : specs) {
    sweep_point point;
    point.spec = spec;
    try {
      point.policy = policies::parse_policy(spec);
    } catch (const policies::spec_error& e) {
      point.complaint = e.what();
    }
    points.push_back(std::move(point));
  }
  sweep_options options;
  options.open.bound = false;
  options.open.device = device_.get();
  options.open.details = wants_details(command_.outputs);
  options.also_open = !closed;
  if (closed) options.model = &*model_;
  // Under several ranks a batch is dealt out; alone it shares one pass.
  options.batch_points = std::max<std::int64_t>(1, std::ssize(specs) / this_rank().size);
  if (share < 1) {
    const auto steps = static_cast<double>(shortest_decode());
    options.open.steps = std::max<std::int64_t>(1, std::llround(std::ceil(share * steps)));
  }
  const auto all = sweep(traces, points, options);
  std::vector<reports::result> rows;
  for (size_t p = 0; root_ && p < points.size(); ++p) {
    std::vector<reports::result> own;
    for (size_t i = p; i < all.size(); i += points.size()) own.push_back(all[i]);
    const auto failed =
        std::find_if(own.begin(), own.end(), [](const auto& row) { return row.status != "ok"; });
    const auto mean = reports::aggregate(own);
    rows.push_back(failed != own.end() ? *failed : mean.empty() ? own.front() : mean.front());
  }
  return broadcast_rows(rows);
}

// The search's own question. The closed loop always runs all steps: a second asking of the same
// point is answered from memory.
std::vector<reports::result> tune_command_run::evaluate_once(std::span<const std::string> specs,
                                                             double share) {
  if (goal_.limit != tune_limit::max_kl) return evaluate(command_.traces, specs, share, false);
  std::vector<std::string> fresh;
  for (const auto& spec : specs) {
    if (!looped_.contains(spec)) fresh.push_back(spec);
  }
  const auto rows = evaluate(command_.traces, fresh, 1, true);
  for (size_t i = 0; i < fresh.size(); ++i) looped_[fresh[i]] = rows[i];
  std::vector<reports::result> out;
  for (const auto& spec : specs) out.push_back(looped_.at(spec));
  return out;
}

// What the first point has: kl_proxy where the traces allow it, else the next best.
std::string tune_command_run::quality_of_traces() const {
  const auto rows = evaluate(command_.traces, std::vector{grids_.front().spec(0)}, 0.01, false);
  const auto name = reports::common_quality(rows);
  return name.empty() ? "output_rel_l2" : std::string(name);
}

// Whether the winner is told from the next: by the intervals of what was optimised.
std::string tune_command_run::sureness(const tuned& found) const {
  if (found.rows.size() < 2) return "there was nothing to compare it with";
  const auto& a = found.rows[0];
  const auto& b = found.rows[1];
  const auto own = a.quality_ci.find(goal_.quality), next = b.quality_ci.find(goal_.quality);
  if (own == a.quality_ci.end() || next == b.quality_ci.end()) {
    return "too little data for intervals: whether it beats the next is open";
  }
  const bool apart =
      own->second.second < next->second.first || own->second.first > next->second.second;
  return apart ? fmt::format("its {} is told from the next one's: the intervals do not meet",
                             goal_.quality)
               : fmt::format("its {} is not told from the next one's: the intervals overlap",
                             goal_.quality);
}

void tune_command_run::print(const tuned& found, std::span<const reports::result> holdout,
                             std::span<const reports::result> checks) const {
  const auto& winner = found.rows.front();
  std::vector<reports::result> shown(
      found.rows.begin(),
      found.rows.begin() + static_cast<std::ptrdiff_t>(std::min(found.rows.size(), shown_rows)));
  for (const auto& row : holdout) shown.push_back(row);
  for (const auto& row : checks) shown.push_back(row);
  reports::table_options options;
  options.width = 110;
  options.labels = labels_of(shown);
  const auto quality = reports::quality_of(winner, goal_.quality);
  options.footer = {
      fmt::format("{} of {} points tried, a part of them on the first quarter of the steps",
                  found.evaluations, found.points)};
  if (winner.mode == "open") options.footer.emplace_back(open_loop_line);
  fmt::print("{}\n", reports::to_table(shown, options));
  fmt::print("best:  {}\n", winner.policy);
  fmt::print("saves: {:.1f} % of the full FP16 cache's mean bytes ({} kept)\n",
             100 * (1 - winner.memory.memory_ratio.value_or(1)),
             bytes_text(winner.memory.mean_bytes.value_or(0)));
  fmt::print("loses: {} {}{}{}\n", goal_.quality,
             quality ? reports::four_digits(*quality) : "not measured",
             interval_text(winner, goal_.quality), second_loss(winner));
  fmt::print("sure:  {}\n", sureness(found));
  if (holdout.empty()) return;
  const bool keeps = violation_of(goal_, holdout.front()) == 0;
  std::size_t rank = 1;
  for (const auto& row : holdout) rank += better(goal_, row, holdout.front()) ? 1 : 0;
  fmt::print("held:  on {} it {} the limit and is number {} of the {} checked there\n",
             holdout.front().trace, keeps ? "keeps" : "misses", rank, holdout.size());
}

int tune_command_run::run() {
  for (const auto& path : command_.outputs) {
    require_known_format(path);
    if (root_) reports::probe_writable(path);
  }
  device_ = choose_device(common_.device);
  if (!command_.model_directory.empty()) model_ = tracer::model::load(command_.model_directory);
  goal_.quality = command_.quality != "auto"          ? command_.quality
                  : goal_.limit == tune_limit::max_kl ? "logit_kl"
                                                      : quality_of_traces();
  progress_bar bar("tune", "points", common_.quiet || !root_);
  std::int64_t done = 0;
  const auto found = tune(grids_, goal_, {.evaluations = command_.evaluations},
                          [&](std::span<const std::string> specs, double share) {
                            auto rows = evaluate_once(specs, share);
                            done += std::ssize(specs);
                            bar.update(done, command_.evaluations);
                            return rows;
                          });
  std::vector<std::string> specs;
  for (std::size_t i = 0; i < std::min(shown_rows, found.rows.size()); ++i) {
    specs.push_back(found.rows[i].policy);
  }
  std::vector<reports::result> checks;
  if (model_ && goal_.limit != tune_limit::max_kl) {
    checks = evaluate(command_.traces, specs, 1, true);
  }
  std::vector<reports::result> holdout;
  if (!command_.holdout.empty()) {
    holdout = evaluate(command_.holdout, specs, 1, goal_.limit == tune_limit::max_kl);
    if (model_ && goal_.limit != tune_limit::max_kl) {
      auto more = evaluate(command_.holdout, specs, 1, true);
      std::move(more.begin(), more.end(), std::back_inserter(checks));
    }
  }
  if (!root_) return exit_ok;
  const auto& best = found.rows.front();
  if (violation_of(goal_, best) > 0) {
    throw traces::trace_error(
        best.status != "ok"
            ? fmt::format("no point could be run: {}", best.note)
            : fmt::format("no point keeps the limit; the nearest, {}, has mean_bytes {:.0f}, "
                          "memory_ratio {:.4g}, attention_recall {:.4g}",
                          best.policy, best.memory.mean_bytes.value_or(0),
                          best.memory.memory_ratio.value_or(0),
                          best.quality.attention_recall.value_or(0)));
  }
  reports::report report;
  report.tool = {version_number(), revision_text(), device_name(device_.get()),
                 hdf5_text(),      cuda_text(),     common_.command_line,
                 compiler_text(),  cpu_text(),      common_.threads};
  report.runs = found.rows;
  reports::mark_pareto(report.runs, goal_.quality);
  report.runs.insert(report.runs.end(), holdout.begin(), holdout.end());
  report.runs.insert(report.runs.end(), checks.begin(), checks.end());
  for (const auto& path : command_.outputs) write_report(path, report);
  print(found, holdout, checks);
  return exit_ok;
}

}  // namespace

int run_tune(const common_options& common, const tune_command& command) {
  return tune_command_run(common, command).run();
}

}  // namespace kvreplay::replay
