#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policies/params.hpp"
#include "policies/policy.hpp"
#include "replay/closed_loop.hpp"
#include "replay/commands.hpp"
#include "replay/device_choice.hpp"
#include "replay/gap.hpp"
#include "replay/labels.hpp"
#include "replay/match_bytes.hpp"
#include "replay/model_match.hpp"
#include "replay/open_loop.hpp"
#include "replay/output_files.hpp"
#include "replay/progress.hpp"
#include "replay/ranks.hpp"
#include "replay/row_basics.hpp"
#include "replay/row_lines.hpp"
#include "replay/text.hpp"
#include "reports/atomic_file.hpp"
#include "reports/csv.hpp"
#include "reports/fidelity.hpp"
#include "reports/table.hpp"
#include "tracer/model.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

// --match-bytes: a policy whose mean bytes are the target, or a size.
struct match_target {
  std::optional<policies::policy> policy;
  double bytes = 0;
};

std::optional<match_target> read_target(const std::string& text) {
  if (text.empty()) return std::nullopt;
  match_target target;
  if (text.find_first_not_of("0123456789") == std::string::npos ||
      (text[0] >= '0' && text[0] <= '9')) {
    policies::param_reader reader("--match-bytes", {{"size", text}});
    const auto amount = reader.size("size", std::nullopt, "");
    if (amount.unit == policies::amount_unit::percent) {
      throw usage_error(
          fmt::format("--match-bytes {}: expected a SPEC or a size such as 64MiB", text));
    }
    target.bytes = amount.value;
    return target;
  }
  target.policy = policies::parse_policy(text);
  return target;
}

free_run free_of(const replay_command& command) {
  return {command.free_run, command.temperature, command.seed};
}

class replay_run {
 public:
  replay_run(const common_options& common, const replay_command& command)
      : common_(common), command_(command), target_(read_target(command.match_bytes)) {
    for (const auto& spec : command.policies) policies_.push_back(policies::parse_policy(spec));
    for (const auto& path : command.outputs) require_known_format(path);
    const bool detailed =
        !command.steps_file.empty() || !command.heads_file.empty() || !command.kept_file.empty();
    if (command.resume && (detailed || command.outputs.empty())) {
      throw usage_error(
          detailed ? "--resume keeps finished rows only: it excludes --steps, --heads and --kept"
                   : "--resume needs -o: the journal of finished rows stands beside that file");
    }
    modes_ = modes_of(command);
    if (ranks_.size > 1 && detailed) {
      throw usage_error(
          "--steps, --heads and --kept are written by one process: run them without mpirun");
    }
  }

  int run();

 private:
  void read_fidelity();
  std::string snapshot_path() const { return command_.outputs.front() + ".snapshot"; }
  void probe() const;
  void start_outputs();
  void run_trace(const std::string& path);
  static std::vector<std::string> modes_of(const replay_command& command);
  void load_model();
  void run_sequence(const traces::reader& trace, int sequence);
  // Rows of one mode, one per match.
  std::vector<reports::result> run_mode(const std::string& mode, const traces::reader& trace,
                                        int sequence, std::span<const matched_policy> matches,
                                        const open_loop_options& options);
  std::vector<lane_output> run_policies(const std::string& mode, const traces::reader& trace,
                                        int sequence, std::span<const policies::policy> todo,
                                        open_loop_options options);
  std::vector<lane_output> run_on_ranks(const std::string& mode, const traces::reader& trace,
                                        int sequence, std::span<const policies::policy> todo,
                                        const open_loop_options& options);
  std::vector<matched_policy> matched(const traces::reader& trace, int sequence,
                                      const open_loop_options& options);
  const reports::result* finished(const std::string& mode, const traces::reader& trace,
                                  int sequence, const policies::policy& policy) const;
  reports::result keep(lane_output lane, const matched_policy& match);
  void write_kept(const traces::reader& trace, int sequence, const lane_output& lane);
  void write_outputs() const;
  void print_table() const;

  const common_options& common_;
  const replay_command& command_;
  rank_place ranks_ = this_rank();
  std::optional<match_target> target_;
  std::vector<policies::policy> policies_;
  std::vector<std::string> modes_;
  std::unique_ptr<kernels::compute_device> device_;  // null: the CPU
  std::optional<tracer::model> model_;
  std::vector<reports::result> journal_rows_;
  std::optional<reports::journal_writer> journal_;
  reports::report report_;
  std::ostringstream steps_, heads_, kept_;
  std::string fidelity_line_;  // empty: not asked for
  bool partial_layers_ = false, recovered_ = false;
};

void replay_run::probe() const {
  for (const auto& path : command_.outputs) reports::probe_writable(path);
  for (const auto* path : {&command_.steps_file, &command_.heads_file, &command_.kept_file}) {
    if (!path->empty()) reports::probe_writable(*path);
  }
}

void replay_run::read_fidelity() {
  const auto& path = command_.fidelity_file;
  if (path.empty()) return;
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  if (file) text << file.rdbuf();
  fidelity_line_ = reports::read_fidelity_line(text.str(), path);
}

void replay_run::start_outputs() {
  probe();
  if (command_.outputs.empty()) return;
  const auto& target = command_.outputs.front();
  if (command_.resume) journal_rows_ = reports::read_journal(target);
  journal_.emplace(target, command_.resume ? reports::journal_writer::start::resume
                                           : reports::journal_writer::start::fresh);
}

int replay_run::run() {
  read_fidelity();
  device_ = choose_device(common_.device);
  if (ranks_.rank == 0) start_outputs();
  if (command_.resume) journal_rows_ = broadcast_rows(journal_rows_);
  report_.tool = {version_number(), revision_text(), device_name(device_.get()),
                  hdf5_text(),      cuda_text(),     common_.command_line,
                  compiler_text(),  cpu_text(),      common_.threads};
  load_model();
  for (const auto& path : command_.traces) run_trace(path);
  if (ranks_.rank != 0) return exit_ok;
  write_outputs();
  if (journal_) {
    journal_->remove();
    std::remove(snapshot_path().c_str());
  }
  print_table();
  const bool failed = std::any_of(report_.runs.begin(), report_.runs.end(),
                                  [](const auto& row) { return row.status != "ok"; });
  if (failed) return exit_failed;
  return recovered_ ? exit_recovered : exit_ok;
}

std::vector<std::string> replay_run::modes_of(const replay_command& command) {
  const std::string mode = !command.mode.empty()             ? command.mode
                           : command.model_directory.empty() ? "open"
                                                             : "both";
  if (mode != "open" && command.model_directory.empty()) {
    throw usage_error(fmt::format("--mode {} needs --model DIR", mode));
  }
  const bool closed_only = command.sequential || command.kv_dtype != "fp16" || command.free_run > 0;
  if (mode == "open" && closed_only) {
    throw usage_error(
        "--sequential, --kv-dtype and --free-run are of the closed loop: give --model DIR");
  }
  if (mode == "both") return {"open", "closed"};
  return {mode};
}

void replay_run::load_model() {
  if (command_.model_directory.empty()) return;
  std::vector<std::string> notes;
  model_ = tracer::model::load(command_.model_directory, &notes);
  if (common_.quiet) return;
  for (const auto& note : notes) fmt::print(stderr, "kvreplay: note: {}\n", note);
}

// A trace that cannot be read is one failed row per policy; the other traces go on. Alone on the
// command line it is the error itself.
void replay_run::run_trace(const std::string& path) {
  try {
    const traces::reader trace(path, {.recover = command_.recover});
    partial_layers_ = partial_layers_ || !trace.model().records_all_layers();
    if (!trace.complete()) {
      recovered_ = true;
      for (const auto& s : trace.sequences()) {
        fmt::print(
            stderr,
            "kvreplay: {}: unfinished recording, replaying {} whole positions of sequence {}\n",
            path, s.n_tokens, s.id);
      }
    }
    for (const auto& s : trace.sequences()) run_sequence(trace, s.id);
  } catch (const traces::trace_error& e) {
    if (command_.traces.size() == 1) throw;
    for (const auto& policy : policies_) {
      reports::result row;
      row.trace = path;
      row.policy = policy.resolved;
      row.name = policy.name;
      row.params = policy.params;
      row.precision = policy.precision_name;
      row.status = "failed";
      row.note = e.what();
      report_.runs.push_back(std::move(row));
    }
  }
}

void replay_run::run_sequence(const traces::reader& trace, int sequence) {
  const auto& info = trace.sequence(sequence);
  if (command_.skip > 0 && command_.skip >= info.n_decode()) {
    throw usage_error(fmt::format("--skip {}: sequence {} of {} has {} decode steps", command_.skip,
                                  sequence, trace.path(), info.n_decode()));
  }
  open_loop_options options;
  options.bound = !command_.no_bound;
  options.skip = command_.skip;
  options.block = command_.block;
  options.device = device_.get();
  options.per_step = !command_.steps_file.empty();
  options.per_head = !command_.heads_file.empty();
  options.kept = !command_.kept_file.empty();
  options.details = wants_details(command_.outputs);
  if (model_) {
    require_same_model(trace, sequence, *model_);
    options.model = &*model_;
  }
  const auto matches = matched(trace, sequence, options);
  std::vector<std::vector<reports::result>> rows;
  for (const auto& mode : modes_) rows.push_back(run_mode(mode, trace, sequence, matches, options));
  const auto first = static_cast<std::ptrdiff_t>(report_.runs.size());
  for (size_t i = 0; i < matches.size(); ++i) {
    for (auto& of_mode : rows) report_.runs.push_back(std::move(of_mode[i]));
  }
  fill_gaps({report_.runs.begin() + first, report_.runs.end()});
}

std::vector<reports::result> replay_run::run_mode(const std::string& mode,
                                                  const traces::reader& trace, int sequence,
                                                  std::span<const matched_policy> matches,
                                                  const open_loop_options& options) {
  std::vector<policies::policy> todo;
  for (const auto& match : matches) {
    if (finished(mode, trace, sequence, match.policy) == nullptr) todo.push_back(match.policy);
  }
  std::vector<lane_output> lanes;
  if (!todo.empty()) lanes = run_on_ranks(mode, trace, sequence, todo, options);
  std::vector<reports::result> out;
  size_t next = 0;
  for (const auto& match : matches) {
    if (const auto* row = finished(mode, trace, sequence, match.policy)) {
      out.push_back(*row);
      continue;
    }
    auto& lane = lanes[next++];
    if (options.kept && lane.row.status == "ok") write_kept(trace, sequence, lane);
    out.push_back(keep(std::move(lane), match));
  }
  return out;
}

// Policies dealt out in parts; every rank has all rows in the end. The closed loop shares matrix
// products between policies: a part for each rank; the open loop is dealt out finer.
std::vector<lane_output> replay_run::run_on_ranks(const std::string& mode,
                                                  const traces::reader& trace, int sequence,
                                                  std::span<const policies::policy> todo,
                                                  const open_loop_options& options) {
  if (ranks_.size == 1) return run_policies(mode, trace, sequence, todo, options);
  const auto count = std::ssize(todo),
             deals = std::int64_t{ranks_.size} * (mode == "closed" ? 1 : 4);
  const std::int64_t part = (count + deals - 1) / deals;
  std::vector<reports::result> rows(todo.size());
  distribute((count + part - 1) / part,
             [&](std::int64_t i) {
               const auto first = static_cast<size_t>(i * part);
               const auto own = todo.subspan(
                   first, std::min<size_t>(static_cast<size_t>(part), todo.size() - first));
               std::vector<reports::result> done;
               for (auto& lane : run_policies(mode, trace, sequence, own, options)) {
                 done.push_back(std::move(lane.row));
               }
               return to_lines(done);
             },
             [&](std::int64_t i, const std::string& lines) {
               auto done = from_lines(lines);
               std::move(done.begin(), done.end(), rows.begin() + i * part);
             });
  std::vector<lane_output> out;
  for (auto& row : broadcast_rows(rows)) {
    out.emplace_back();
    out.back().row = std::move(row);
  }
  return out;
}

std::vector<lane_output> replay_run::run_policies(const std::string& mode,
                                                  const traces::reader& trace, int sequence,
                                                  std::span<const policies::policy> todo,
                                                  open_loop_options options) {
  const bool closed = mode == "closed";
  progress_bar bar(fmt::format("{} policies{}", todo.size(), closed ? ", closed loop" : ""),
                   "layer steps", common_.quiet || ranks_.rank != 0);
  options.progress = [&](std::int64_t done, std::int64_t total) { bar.update(done, total); };
  if (!closed) return replay_open(trace, sequence, todo, options);
  closed_loop_options loop;
  loop.block = command_.sequential ? 1 : options.block;
  loop.kv_fp32 = command_.kv_dtype == "fp32";
  loop.skip = options.skip;
  loop.per_step = options.per_step;
  loop.kept = options.kept;
  loop.free = free_of(command_);
  if (!command_.outputs.empty()) loop.snapshot = snapshot_path();
  loop.resume = command_.resume;
  loop.details = options.details;
  loop.progress = options.progress;
  auto lanes = replay_closed(trace, sequence, *model_, todo, loop);
  for (auto& lane : lanes) {
    if (device_ != nullptr) add_note(lane.row, "on the CPU: the closed loop has no device code");
  }
  return lanes;
}

std::vector<matched_policy> replay_run::matched(const traces::reader& trace, int sequence,
                                                const open_loop_options& options) {
  if (!target_) {
    std::vector<matched_policy> as_given;
    for (const auto& policy : policies_) as_given.push_back({policy, {}, {}, {}});
    return as_given;
  }
  double bytes = target_->bytes;
  if (target_->policy) {
    auto light = options;
    light.quality = light.per_step = light.per_head = light.kept = light.details = false;
    const auto rows = replay_open(trace, sequence, {&*target_->policy, 1}, light);
    if (rows[0].row.status != "ok") {
      throw traces::trace_error(
          fmt::format("--match-bytes {}: {}", command_.match_bytes, rows[0].row.note));
    }
    bytes = rows[0].row.memory.mean_bytes.value_or(0);
  }
  return match_bytes(trace, sequence, policies_, bytes, options);
}

const reports::result* replay_run::finished(const std::string& mode, const traces::reader& trace,
                                            int sequence, const policies::policy& policy) const {
  const bool closed = mode == "closed";
  // A closed row scores tokens, and the last position has none to predict.
  const bool free = closed && command_.free_run > 0;
  const auto scored = free ? command_.free_run - command_.skip
                           : trace.sequence(sequence).n_decode() - command_.skip - (closed ? 1 : 0);
  const auto says = [](const reports::result& row, const std::string& text) {
    return row.note.find(text) != std::string::npos;
  };
  for (const auto& row : journal_rows_) {
    const bool same_run = closed ? says(row, fp32_note) == (command_.kv_dtype == "fp32") &&
                                       (free ? says(row, free_run_note(free_of(command_)))
                                             : row.quality.ppl.has_value())
                                 : row.quality.recall_bound.has_value() != command_.no_bound;
    if (row.status == "ok" && row.trace_fingerprint == trace.fingerprint(sequence) &&
        row.sequence == sequence && row.policy == policy.resolved && row.mode == mode &&
        row.tokens.scored == scored && same_run) {
      return &row;
    }
  }
  return nullptr;
}

reports::result replay_run::keep(lane_output lane, const matched_policy& match) {
  auto& row = lane.row;
  if (row.mode == "open" && !fidelity_line_.empty()) add_note(row, fidelity_line_);
  row.budget_factor = match.factor;
  row.match_difference = match.difference;
  if (!match.note.empty()) {
    row.note += fmt::format("{}{}", row.note.empty() ? "" : "; ", match.note);
  }
  for (const auto& step : lane.steps) reports::write_row(steps_, step);
  for (const auto& head : lane.heads) reports::write_row(heads_, head);
  if (journal_) journal_->append(row);
  return std::move(row);
}

void replay_run::write_kept(const traces::reader& trace, int sequence, const lane_output& lane) {
  reports::kept_row row;
  row.key = {lane.row.trace, lane.row.policy, lane.row.mode, sequence};
  for_each_kept_set(
      trace, sequence, lane,
      [&](std::int64_t step, int layer, int kv_head, const std::vector<std::int32_t>& positions) {
        row.step = step;
        row.layer = layer;
        row.kv_head = kv_head;
        row.positions = positions;
        reports::write_row(kept_, row);
      });
}

void replay_run::write_outputs() const {
  for (const auto& path : command_.outputs) write_report(path, report_);
  const auto detailed = [](const std::string& path, std::string_view header,
                           const std::ostringstream& rows) {
    if (!path.empty()) reports::write_atomic(path, std::string(header) + rows.str());
  };
  detailed(command_.steps_file, reports::steps_header, steps_);
  detailed(command_.heads_file, reports::heads_header, heads_);
  detailed(command_.kept_file, reports::kept_header, kept_);
}

void replay_run::print_table() const {
  reports::table_options options;
  options.width = 110;
  options.labels = labels_of(report_.runs);
  auto noted = report_.runs;  // the line of --fidelity stands in its own place
  for (auto& row : noted) {
    if (!fidelity_line_.empty())
      row.note.erase(0, row.note.find(fidelity_line_) == 0 ? fidelity_line_.size() : 0);
  }
  options.footer = note_lines(noted, options.labels);
  if (partial_layers_) {
    options.footer.push_back(fmt::format("layers {}: bytes and quality are of the recorded layers",
                                         report_.runs.front().layers));
  }
  if (target_) {
    options.footer.push_back(
        fmt::format("budgets scaled to the mean bytes of {}", command_.match_bytes));
  }
  for (const auto& mode : modes_) {
    options.footer.emplace_back(mode == "open" ? open_loop_line : closed_loop_line);
    if (mode == "open" && !fidelity_line_.empty()) options.footer.push_back(fidelity_line_);
  }
  fmt::print("{}", reports::to_table(report_.runs, options));
}

}  // namespace

int run_replay(const common_options& common, const replay_command& command) {
  replay_run run(common, command);
  return run.run();
}

}  // namespace kvreplay::replay
