#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "replay/commands.hpp"
#include "replay/device_choice.hpp"
#include "replay/labels.hpp"
#include "replay/output_files.hpp"
#include "replay/progress.hpp"
#include "replay/text.hpp"
#include "replay/timing.hpp"
#include "reports/atomic_file.hpp"
#include "reports/table.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

std::string rate(double bytes_per_s) { return fmt::format("{:.1f} GB/s", bytes_per_s * 1e-9); }

void print_timing(const reports::report& report, bool on_device) {
  reports::table_options options;
  options.width = 120;
  options.labels = labels_of(report.runs);
  options.more = {"time.batch",
                  "time.step_us_p50",
                  "time.step_us_p99",
                  "time.attend_us_p50",
                  "time.select_us_p50",
                  "time.attend_bytes_per_s",
                  "time.copy_bytes_per_s",
                  "time.speedup",
                  "time.net_saved_us_mean"};
  options.footer = note_lines(report.runs, options.labels);
  for (const auto& row : report.runs) {
    if (row.status != "ok") continue;
    options.footer.push_back(
        fmt::format("microseconds of a decode step over layers {} and the batch, {}; speedup: over "
                    "the full FP16 "
                    "cache's mean step; copies from memory reach {}",
                    row.layers, on_device ? report.tool.device : "one core",
                    rate(*row.time.memory_copy_bytes_per_s)));
    break;
  }
  fmt::print("{}", reports::to_table(report.runs, options));
}

}  // namespace

int run_time(const common_options& common, const time_command& command) {
  const auto device = choose_device(common.device);
  std::vector<policies::policy> policies;
  for (const auto& spec : command.policies) policies.push_back(policies::parse_policy(spec));
  for (const auto& path : command.outputs) {
    require_known_format(path);
    reports::probe_writable(path);
  }
  timing_options options;
  options.batch = command.batch;
  options.repeat = command.repeat;
  options.device = device.get();
  reports::report report;
  report.tool = {version_number(), revision_text(), device_name(device.get()),
                 hdf5_text(),      cuda_text(),     common.command_line,
                 compiler_text(),  cpu_text(),      1};
  const traces::reader trace(command.trace);
  for (const auto& s : trace.sequences()) {
    progress_bar bar(fmt::format("sequence {}", s.id), "layers", common.quiet);
    options.progress = [&](std::int64_t done, std::int64_t total) { bar.update(done, total); };
    auto rows = time_policies(trace, s.id, policies, options);
    std::move(rows.begin(), rows.end(), std::back_inserter(report.runs));
  }
  for (const auto& path : command.outputs) write_report(path, report);
  print_timing(report, device != nullptr);
  const bool failed = std::any_of(report.runs.begin(), report.runs.end(),
                                  [](const auto& row) { return row.status != "ok"; });
  return failed ? exit_failed : exit_ok;
}

}  // namespace kvreplay::replay
