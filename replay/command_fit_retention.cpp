#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "policies/policy.hpp"
#include "replay/commands.hpp"
#include "replay/fit_retention.hpp"
#include "replay/open_loop.hpp"
#include "replay/progress.hpp"
#include "reports/atomic_file.hpp"

namespace kvreplay::replay {
namespace {

// The learned scores at work on what was held out: mean recall of the policies that use them and of
// h2o, all at the same bytes: a quarter of the positions per KV head.
void print_recall(const std::string& path, const fit_outcome& fit) {
  const traces::reader trace(path);
  std::vector<double> recall(3);
  std::set<std::string> notes;
  double sequences = 0;
  std::int64_t budget = 0;
  for (const auto& info : trace.sequences()) {
    const bool held = fit.held_out.empty() || std::find(fit.held_out.begin(), fit.held_out.end(),
                                                        info.id) != fit.held_out.end();
    if (!held) continue;
    budget = std::max<std::int64_t>(1, info.n_tokens / 4);
    open_loop_options options;
    options.bound = false;
    options.skip = std::clamp<std::int64_t>(fit.first_held - info.n_prompt, 0, info.n_decode() - 1);
    const std::vector<policies::policy> policies = {
        policies::parse_policy(fmt::format("trimkv:budget={}", budget)),
        policies::parse_policy(fmt::format("dbtrimkv:budget={}", budget)),
        policies::parse_policy(fmt::format("h2o:budget={}", budget))};
    const auto lanes = replay_open(trace, info.id, policies, options);
    for (std::size_t i = 0; i < lanes.size(); ++i) {
      const auto& row = lanes[i].row;
      if (row.status != "ok") notes.insert(row.note);
      recall[i] += row.quality.attention_recall.value_or(std::numeric_limits<double>::quiet_NaN());
    }
    ++sequences;
  }
  const auto mean = [&](std::size_t i) {
    return std::isnan(recall[i]) ? std::string("not measured")
                                 : fmt::format("{:.4f}", recall[i] / sequences);
  };
  fmt::print("attention recall at {} entries a head, held out:   trimkv {}, dbtrimkv {}, h2o {}\n",
             budget, mean(0), mean(1), mean(2));
  for (const auto& note : notes) fmt::print(stderr, "kvreplay: note: {}\n", note);
}

}  // namespace

int run_fit_retention(const common_options& common, const fit_retention_command& command) {
  reports::probe_writable(command.output);
  const traces::reader trace(command.trace);
  fit_options options;
  options.projection = command.projection == "shared"  ? gate_projection::shared
                       : command.projection == "layer" ? gate_projection::layer
                                                       : gate_projection::head;
  options.hidden = command.hidden;
  options.epochs = command.epochs;
  options.train_share = command.train_share;
  options.seed = command.seed;
  fit_outcome fit;
  {
    progress_bar bar("fitting", "epochs", common.quiet);
    options.progress = [&](auto done, auto total) { bar.update(done, total); };
    fit = fit_retention(trace, options);
  }
  traces::copy_with_retention(command.trace, command.output, fit.rows, fit.gate);
  fmt::print("fitted on {}, checked on {}\n",
             fit.held_out.empty()
                 ? fmt::format("positions below {}", fit.first_held)
                 : fmt::format("{} sequences", trace.sequences().size() - fit.held_out.size()),
             fit.held_out.empty() ? "the rest of the one sequence"
                                  : fmt::format("{} others", fit.held_out.size()));
  fmt::print(
      "loss, nats per entry and age:   {:.4f} fitted, {:.4f} held out ({:.4f} with one decay a "
      "head)\n",
      fit.train_loss, fit.held_loss, fit.held_loss_constant);
  fmt::print(
      "rank correlation with the attention still to come, held out:   {:.3f} ({:.3f} by recency "
      "alone)\n",
      fit.rank_correlation, fit.recency_correlation);
  print_recall(command.output, fit);
  fmt::print("{}: a copy with `retention` and the gate\n", command.output);
  return exit_ok;
}

}  // namespace kvreplay::replay
