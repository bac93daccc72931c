#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "replay/commands.hpp"
#include "replay/probe.hpp"
#include "replay/progress.hpp"
#include "replay/text.hpp"
#include "reports/atomic_file.hpp"
#include "reports/text.hpp"
#include "tracer/model.hpp"

namespace kvreplay::replay {
namespace {

using json = nlohmann::ordered_json;

json number(const reports::maybe& value) { return value ? json(*value) : json(nullptr); }

json to_json(const std::string& trace, const traces::sequence_info& info, const probe_series& s) {
  json points = json::array();
  for (const auto& p : s.points) points.push_back({p.position, p.confidence, p.kl});
  return {{"trace", reports::escape_bytes(trace, reports::controls::keep)},
          {"sequence", info.id},
          {"temperature", info.temperature ? json(*info.temperature) : json(nullptr)},
          {"hidden", s.hidden},
          {"confidence_kl_pearson", number(s.pearson)},
          {"pearson_ci", {number(s.pearson_ci.first), number(s.pearson_ci.second)}},
          {"spearman", number(s.spearman)},
          {"spearman_ci", {number(s.spearman_ci.first), number(s.spearman_ci.second)}},
          {"points", std::move(points)}};
}

std::string text_of(const reports::maybe& x) { return x ? fmt::format("{:.3f}", *x) : "-"; }

void print(const std::string& trace, int sequence, const probe_series& s) {
  double kl = 0;
  for (const auto& p : s.points) kl += p.kl / static_cast<double>(s.points.size());
  const auto ends = [](const auto& ci) {
    return fmt::format("[{}, {}]", text_of(ci.first), text_of(ci.second));
  };
  fmt::print("{:>6}  {:>6}  {:>8.4f}  {:>8} {:<18} {:>8} {:<18} {}#{}\n", s.hidden, s.points.size(),
             kl, text_of(s.pearson), ends(s.pearson_ci), text_of(s.spearman), ends(s.spearman_ci),
             reports::escape_bytes(trace, reports::controls::none), sequence);
}

}  // namespace

int run_probe(const common_options& common, const probe_command& command) {
  if (!command.output.empty()) reports::probe_writable(command.output);
  const auto model = tracer::model::load(command.model_directory);
  json series = json::array();
  fmt::print("{:>6}  {:>6}  {:>8}  {:>8} {:<18} {:>8} {:<18} trace\n", "hidden", "steps", "mean KL",
             "Pearson", "95 %", "Spearman", "95 %");
  for (const auto& path : command.traces) {
    const traces::reader trace(path);
    for (const auto& info : trace.sequences()) {
      std::vector<probe_series> found;
      {
        progress_bar bar("probe", "tokens", common.quiet);
        found = probe_confidence(
            trace, info.id, model, command.hidden, 128,
            [&](std::int64_t done, std::int64_t total) { bar.update(done, total); });
      }
      for (const auto& s : found) {
        print(path, info.id, s);
        series.push_back(to_json(path, info, s));
      }
    }
  }
  fmt::print(
      "KL(full || positions t-n .. t-1 hidden from step t alone) against c(t); 95 %: bootstrap "
      "over blocks of 64 steps\n");
  if (command.output.empty()) return exit_ok;
  const json all = {
      {"schema", "kvreplay.probe/1"},
      {"version", version_number()},
      {"revision", revision_text()},
      {"command", reports::escape_bytes(common.command_line, reports::controls::keep)},
      {"series", std::move(series)}};
  reports::write_atomic(command.output, all.dump(1) + "\n");
  return exit_ok;
}

}  // namespace kvreplay::replay
