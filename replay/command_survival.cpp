#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string>

#include "replay/commands.hpp"
#include "replay/progress.hpp"
#include "replay/survival.hpp"
#include "reports/atomic_file.hpp"

namespace kvreplay::replay {
namespace {

std::string csv_of(const std::vector<survival_curve>& curves) {
  std::string out = "layer,kv_head,age,alive,seen,beta\n";
  for (const auto& c : curves) {
    for (std::size_t i = 0; i < c.age.size(); ++i) {
      out += fmt::format("{},{},{},{},{},{}\n", c.layer, c.kv_head, c.age[i], c.alive[i], c.seen[i],
                         c.beta);
    }
  }
  return out;
}

// A line per layer: means over its KV heads at up to eight ages.
void print_curves(const std::vector<survival_curve>& curves) {
  std::map<int, std::vector<const survival_curve*>> layers;
  for (const auto& c : curves) layers[c.layer].push_back(&c);
  const auto& age = curves.front().age;
  const std::size_t step = std::max<std::size_t>(1, (age.size() + 7) / 8);
  std::string header = fmt::format("{:>5}", "layer");
  for (std::size_t i = 0; i < age.size(); i += step)
    header += fmt::format("{:>9}", fmt::format("age {}", age[i]));
  fmt::print("{}{:>9}{:>9}{:>9}\n", header, "beta", "worst", "gain");
  for (const auto& [layer, heads] : layers) {
    const auto mean = [&](auto value) {
      double sum = 0;
      for (const auto* c : heads) sum += value(*c);
      return sum / static_cast<double>(heads.size());
    };
    std::string line = fmt::format("{:>5}", layer);
    for (std::size_t i = 0; i < age.size(); i += step) {
      line += fmt::format("{:>9.4f}", mean([&](const auto& c) { return c.alive[i]; }));
    }
    fmt::print("{}{:>9.5f}{:>9.4f}{:>9.4f}\n", line, mean([](const auto& c) { return c.beta; }),
               mean([](const auto& c) { return c.worst; }),
               mean([](const auto& c) { return c.log_likelihood_gain; }));
  }
  fmt::print(
      "age a: share of entries that draw more than the uniform share at least once a positions or "
      "later; beta: the decay beta^a that fits it best;\nworst: its largest error; gain: nats per "
      "observation over one constant share. Means over the KV heads of a layer.\n");
}

}  // namespace

int run_survival(const common_options& common, const survival_command& command) {
  if (!command.output.empty()) reports::probe_writable(command.output);
  const traces::reader trace(command.trace);
  std::vector<survival_curve> curves;
  {
    progress_bar bar("survival", "layers", common.quiet);
    curves = measure_survival(trace, [&](auto done, auto total) { bar.update(done, total); });
  }
  if (curves.empty() || curves.front().age.empty()) {
    throw traces::trace_error(
        fmt::format("{}: sequences of one position have no ages", command.trace));
  }
  if (!command.output.empty()) reports::write_atomic(command.output, csv_of(curves));
  print_curves(curves);
  return exit_ok;
}

}  // namespace kvreplay::replay
