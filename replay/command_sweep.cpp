#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>

#include "replay/commands.hpp"
#include "replay/device_choice.hpp"
#include "replay/labels.hpp"
#include "replay/output_files.hpp"
#include "replay/progress.hpp"
#include "replay/ranks.hpp"
#include "replay/sweep.hpp"
#include "replay/text.hpp"
#include "reports/aggregate.hpp"
#include "reports/atomic_file.hpp"
#include "reports/pareto.hpp"
#include "reports/table.hpp"

namespace kvreplay::replay {
namespace {

constexpr std::size_t most_table_rows = 40;
// Each row in the journal carries what charts need, about 20 KB; longer sweeps do without.
constexpr std::ptrdiff_t most_detailed_points = 512;

struct shard {
  int index = 0, of = 1;
};

shard read_shard(const std::string& text) {
  if (text.empty()) return {};
  shard out;
  const char* end = text.data() + text.size();
  const auto [slash, first] = std::from_chars(text.data(), end, out.index);
  if (first == std::errc{} && slash != end && *slash == '/') {
    const auto [rest, second] = std::from_chars(slash + 1, end, out.of);
    if (second == std::errc{} && rest == end && out.index >= 1 && out.index <= out.of) {
      --out.index;
      return out;
    }
  }
  throw usage_error(fmt::format("--shard {}: expected i/n with 1 <= i <= n, such as 2/8", text));
}

std::string seconds_text(double seconds) {
  return seconds < 120 ? fmt::format("{:.3g} s", seconds) : fmt::format("{:.3g} min", seconds / 60);
}

class sweep_command_run {
 public:
  sweep_command_run(const common_options& common, const sweep_command& command)
      : common_(common), command_(command), root_(this_rank().rank == 0) {}
  int run();

 private:
  sweep_options options_for_sweep(bool details);
  void mark(std::vector<reports::result>& rows);
  void write(std::vector<reports::result> rows) const;
  void print(const std::vector<reports::result>& rows) const;

  const common_options& common_;
  const sweep_command& command_;
  bool root_;
  std::string quality_;                              // the metric of the marks
  std::unique_ptr<kernels::compute_device> device_;  // null: the CPU
  std::optional<tracer::model> model_;
  std::optional<reports::journal_writer> journal_;
  std::unique_ptr<progress_bar> bar_;
};

sweep_options sweep_command_run::options_for_sweep(bool details) {
  sweep_options options;
  options.batch_points = command_.batch_points;
  options.recover = command_.recover;
  options.open.bound = !command_.no_bound;
  options.open.skip = command_.skip;
  options.open.device = device_.get();
  options.open.details = details;
  if (model_) options.model = &*model_;
  options.also_open = command_.mode != "closed";
  if (!root_) return options;
  if (!command_.outputs.empty()) {
    const auto& target = command_.outputs.front();
    if (command_.resume) options.known = reports::read_journal(target);
    journal_.emplace(target, command_.resume ? reports::journal_writer::start::resume
                                             : reports::journal_writer::start::fresh);
    options.finished = [this](const reports::result& row) { journal_->append(row); };
  }
  options.pilot = [this](double seconds, std::int64_t more) {
    if (common_.quiet) return;
    fmt::print(stderr, "one point took {}; the other {} take at most about {}\n",
               seconds_text(seconds), more,
               seconds_text(seconds * static_cast<double>(more) / this_rank().size));
    bar_ = std::make_unique<progress_bar>("sweep", "points", common_.quiet);
  };
  options.progress = [this](std::int64_t done, std::int64_t total) {
    if (bar_) bar_->update(done, total);
  };
  return options;
}

// Each mode by the best quality that all of its rows have, or by the one asked for.
void sweep_command_run::mark(std::vector<reports::result>& rows) {
  std::vector<std::string> used;
  for (const char* mode : {"open", "closed"}) {
    std::vector<reports::result> own;
    for (const auto& row : rows) {
      if (row.mode == mode) own.push_back(row);
    }
    if (own.empty()) continue;
    const auto quality =
        command_.quality == "auto" ? std::string(reports::common_quality(own)) : command_.quality;
    reports::mark_pareto(own, quality);
    used.push_back(quality);
    auto marked = own.begin();
    for (auto& row : rows) {
      if (row.mode == mode) row.pareto = (marked++)->pareto;
    }
  }
  quality_ = used.size() == 2 ? fmt::format("{} (open) or {} (closed)", used[0], used[1])
                              : fmt::format("{}", fmt::join(used, ""));
}

// Several sequences: their means come behind the rows they are means of, and carry the marks too.
void sweep_command_run::write(std::vector<reports::result> rows) const {
  reports::report report;
  report.tool = {version_number(), revision_text(), device_name(device_.get()),
                 hdf5_text(),      cuda_text(),     common_.command_line,
                 compiler_text(),  cpu_text(),      common_.threads};
  report.runs = std::move(rows);
  for (const auto& path : command_.outputs) write_report(path, report);
}

void sweep_command_run::print(const std::vector<reports::result>& rows) const {
  const auto means =
      std::any_of(rows.begin(), rows.end(), [](const auto& row) { return row.sequence == -1; });
  std::vector<reports::result> shown;
  std::size_t failed = 0, on_front = 0;
  for (const auto& row : rows) {
    if (row.status != "ok") ++failed;
    const bool front = row.pareto.value_or(0) == 1 && (!means || row.sequence == -1);
    if (front) ++on_front;
    if (front || row.status != "ok") shown.push_back(row);
  }
  std::stable_sort(shown.begin(), shown.end(), [](const auto& a, const auto& b) {
    return a.memory.mean_bytes.value_or(1e300) < b.memory.mean_bytes.value_or(1e300);
  });
  const std::size_t hidden = shown.size() - std::min(shown.size(), most_table_rows);
  shown.resize(shown.size() - hidden);
  reports::table_options options;
  options.width = 110;
  options.labels = labels_of(shown);
  options.footer.push_back(
      fmt::format("{} of {} rows, {} failed: those that no other beats in bytes and {} at once{}",
                  on_front, rows.size(), failed, quality_,
                  hidden == 0 ? "" : fmt::format("; {} more not shown", hidden)));
  if (std::any_of(shown.begin(), shown.end(), [](const auto& row) { return row.mode == "open"; })) {
    options.footer.emplace_back(open_loop_line);
  }
  fmt::print("{}", reports::to_table(shown, options));
}

int sweep_command_run::run() {
  const auto part = read_shard(command_.shard);
  for (const auto& path : command_.outputs) {
    require_known_format(path);
    if (root_) reports::probe_writable(path);
  }
  if (command_.resume && command_.outputs.empty()) {
    throw usage_error("--resume needs -o: the journal of finished rows stands beside that file");
  }
  device_ = choose_device(common_.device);
  if (!command_.model_directory.empty() && command_.mode != "open") {
    model_ = tracer::model::load(command_.model_directory);
  } else if (command_.mode == "closed" || command_.mode == "both") {
    throw usage_error(fmt::format("--mode {} needs --model DIR", command_.mode));
  }
  std::int64_t repeated = 0;
  const auto points = take_shard(sweep_points(command_.policies, repeated), part.index, part.of);
  if (root_ && !common_.quiet) {
    fmt::print(stderr, "{} points on {} {}{}\n", points.size(), command_.traces.size(),
               command_.traces.size() == 1 ? "trace" : "traces",
               repeated == 0 ? "" : fmt::format("; {} more are the same as others", repeated));
  }
  const bool few = std::ssize(points) * std::ssize(command_.traces) <= most_detailed_points;
  auto rows =
      sweep(command_.traces, points, options_for_sweep(few && wants_details(command_.outputs)));
  bar_.reset();
  if (!root_) return exit_ok;
  auto means = reports::aggregate(rows);
  std::move(means.begin(), means.end(), std::back_inserter(rows));
  mark(rows);
  write(rows);
  if (journal_) journal_->remove();
  print(rows);
  const bool failed =
      std::any_of(rows.begin(), rows.end(), [](const auto& row) { return row.status != "ok"; });
  return failed ? exit_failed : exit_ok;
}

}  // namespace

int run_sweep(const common_options& common, const sweep_command& command) {
  return sweep_command_run(common, command).run();
}

}  // namespace kvreplay::replay
