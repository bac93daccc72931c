// The commands behind `kvreplay`: main.cpp fills these structs from the command line and calls the
// functions, which return the exit code. They print results to stdout and everything else to
// stderr; errors are exceptions that main turns into one line.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tracer/record.hpp"
#include "traces/synth.hpp"

namespace kvreplay::replay {

// A command line that cannot be meant: exit code 2.
class usage_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum exit_code : int { exit_ok = 0, exit_failed = 1, exit_usage = 2, exit_recovered = 3 };

struct common_options {
  std::string device = "auto";  // auto | cpu | cuda
  int threads = 0;              // 0: one per core
  bool quiet = false;
  std::string command_line;  // as typed, for the results file
};

struct record_command {
  std::string model_directory, tokens_file, output;
  std::string kv_dtype = "fp16", logits = "stats", attention = "none", rows = "all";
  std::vector<std::string> with;
  tracer::record_options options;
};
int run_record(const common_options& common, record_command command);

struct synth_command {
  std::string output, heads = "6/3";
  std::vector<std::string> with;
  traces::synth_options options;
};
int run_synth(const common_options& common, synth_command command);

struct inspect_command {
  std::string trace;
  bool check = false, all = false, recover = false;
};
int run_inspect(const common_options& common, const inspect_command& command);

struct policies_command {
  std::string name;
};
int run_policies(const policies_command& command);

struct replay_command {
  std::vector<std::string> traces, policies, outputs;
  std::string match_bytes, steps_file, heads_file, kept_file;
  std::string model_directory, mode, kv_dtype = "fp16", fidelity_file;
  bool sequential = false;
  std::int64_t free_run = 0;
  double temperature = 0;
  std::uint64_t seed = 0;
  std::int64_t skip = 0, block = 128;
  bool no_bound = false, recover = false, resume = false;
};
int run_replay(const common_options& common, const replay_command& command);

struct sweep_command {
  std::vector<std::string> traces, policies, outputs;
  std::string quality = "auto", shard, model_directory, mode;
  std::int64_t batch_points = 32, skip = 0;
  bool no_bound = false, recover = false, resume = false;
};
int run_sweep(const common_options& common, const sweep_command& command);

struct tune_command {
  std::vector<std::string> traces, policies, holdout, outputs;
  std::string quality = "auto", max_bytes, model_directory;
  std::optional<double> max_ratio, min_recall, max_kl;
  std::int64_t evaluations = 100;
};
int run_tune(const common_options& common, const tune_command& command);

struct survival_command {
  std::string trace, output;
};
int run_survival(const common_options& common, const survival_command& command);

struct headscore_command {
  std::vector<std::string> traces;
  std::string output;
};
int run_headscore(const common_options& common, const headscore_command& command);

struct fit_retention_command {
  std::string trace, output, projection = "shared";
  int hidden = 16, epochs = 30;
  double train_share = 0.75;
  std::uint64_t seed = 0;
};
int run_fit_retention(const common_options& common, const fit_retention_command& command);

struct time_command {
  std::string trace;
  std::vector<std::string> policies, outputs;
  std::vector<int> batch = {1};
  int repeat = 3;
};
int run_time(const common_options& common, const time_command& command);

struct report_command {
  std::vector<std::string> results;
  std::string output;
};
int run_report(const report_command& command);

struct fidelity_command {
  std::vector<std::string> inputs, policies, outputs;
  std::string model_directory;
};
int run_fidelity(const common_options& common, const fidelity_command& command);

struct probe_command {
  std::vector<std::string> traces;
  std::string model_directory, output;
  std::vector<int> hidden = {16, 64, 256};
};
int run_probe(const common_options& common, const probe_command& command);

// `kvreplay --version`: version, revision, compiler, HDF5, CUDA, CPU, GPU; several lines.
std::string version_text();

}  // namespace kvreplay::replay
