#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "policies/policy.hpp"
#include "replay/closed_loop.hpp"
#include "replay/commands.hpp"
#include "replay/model_match.hpp"
#include "replay/open_loop.hpp"
#include "replay/progress.hpp"
#include "replay/text.hpp"
#include "reports/atomic_file.hpp"
#include "reports/fidelity.hpp"
#include "reports/json.hpp"
#include "tracer/model.hpp"

namespace kvreplay::replay {
namespace {

bool is_json(const std::string& path) {
  return path.size() > 5 && path.compare(path.size() - 5, 5, ".json") == 0;
}

// Both loops over every sequence of a trace.
void run_both(const common_options& common, const std::string& path, const tracer::model& model,
              std::span<const policies::policy> policies, std::vector<reports::result>& rows) {
  const traces::reader trace(path);
  for (const auto& info : trace.sequences()) {
    require_same_model(trace, info.id, model);
    open_loop_options open;
    open.bound = false;
    open.model = &model;
    closed_loop_options closed;
    for (const bool with_model : {false, true}) {
      progress_bar bar(fmt::format("{}, {} loop", path, with_model ? "closed" : "open"),
                       "layer steps", common.quiet);
      const auto progress = [&](std::int64_t done, std::int64_t total) { bar.update(done, total); };
      open.progress = closed.progress = progress;
      auto lanes = with_model ? replay_closed(trace, info.id, model, policies, closed)
                              : replay_open(trace, info.id, policies, open);
      for (auto& lane : lanes) rows.push_back(std::move(lane.row));
    }
  }
}

void print(const reports::fidelity& f) {
  fmt::print("{:<20}{:<16}{:>10}{:>18}{:>10}{:>18}{:>12}\n", "open loop", "closed loop", "spearman",
             "95 %", "kendall", "95 %", "inversions");
  const auto text = [](const reports::maybe& x) { return x ? fmt::format("{:.3f}", *x) : "-"; };
  const std::string shown = f.traces.size() > 1 ? "" : f.traces.front();
  for (const auto& a : f.agreements) {
    if (a.trace != shown) continue;
    std::size_t inversions = 0;
    for (const auto& one : f.agreements) {
      if (one.open == a.open && one.closed == a.closed) inversions += one.inversions.size();
    }
    fmt::print("{:<20}{:<16}{:>10}{:>18}{:>10}{:>18}{:>12}\n", a.open, a.closed, text(a.spearman),
               fmt::format("[{}, {}]", text(a.spearman_ci.first), text(a.spearman_ci.second)),
               text(a.kendall),
               fmt::format("[{}, {}]", text(a.kendall_ci.first), text(a.kendall_ci.second)),
               inversions);
  }
  fmt::print("{}\n", reports::fidelity_line(f));
}

}  // namespace

int run_fidelity(const common_options& common, const fidelity_command& command) {
  for (const auto& path : command.outputs) {
    if (!is_json(path))
      throw usage_error(fmt::format("-o {}: expected a name ending in .json", path));
    reports::probe_writable(path);
  }
  std::vector<policies::policy> policies;
  for (const auto& spec : command.policies) policies.push_back(policies::parse_policy(spec));
  const bool traces = !std::all_of(command.inputs.begin(), command.inputs.end(), is_json);
  if (traces && (policies.empty() || command.model_directory.empty())) {
    throw usage_error(
        "fidelity over traces needs -p and --model; results files (.json) need neither");
  }
  std::vector<reports::result> rows;
  std::optional<tracer::model> model;
  if (traces) model = tracer::model::load(command.model_directory);
  for (const auto& path : command.inputs) {
    if (!is_json(path)) {
      run_both(common, path, *model, policies, rows);
      continue;
    }
    std::ifstream file(path, std::ios::binary);
    if (!file) throw reports::report_error(path + ": cannot be read");
    std::stringstream text;
    text << file.rdbuf();
    for (auto& row : reports::read_json(text.str(), path).runs) rows.push_back(std::move(row));
  }
  const auto f = reports::measure_fidelity(rows);
  reports::tool_info tool;
  tool.version = version_number();
  tool.revision = revision_text();
  tool.command = common.command_line;
  for (const auto& path : command.outputs) reports::write_atomic(path, reports::to_json(f, tool));
  print(f);
  return exit_ok;
}

}  // namespace kvreplay::replay
