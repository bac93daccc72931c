// kvreplay: declare, parse, dispatch. Everything else lives behind commands.hpp.
#include <fmt/format.h>
#include <tbb/global_control.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "policies/params.hpp"
#include "policies/policy.hpp"
#include "replay/commands.hpp"
#include "replay/ranks.hpp"
#include "reports/text.hpp"

namespace {

using namespace kvreplay::replay;

struct command_line {
  common_options common;
  record_command record;
  synth_command synth;
  inspect_command inspect;
  policies_command policies;
  replay_command replay;
  probe_command probe;
  fidelity_command fidelity;
  sweep_command sweep;
  survival_command survival;
  headscore_command headscore;
  fit_retention_command fit_retention;
  time_command time;
  tune_command tune;
  report_command report;
};

void add_common(CLI::App& app, common_options& common) {
  app.add_option("--threads", common.threads, "Threads; results do not depend on it [one per core]")
      ->check(CLI::Range(1, 4096));
  app.add_flag("--quiet", common.quiet, "No progress and no notes on stderr");
}

void add_device(CLI::App& app, common_options& common) {
  app.add_option("--device", common.device, "auto, cpu or cuda")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
}

// -p may stand several times, with one SPEC each.
void add_specs(CLI::App& sub, std::vector<std::string>& policies, const std::string& help) {
  sub.add_option("-p,--policy", policies, help)
      ->required()
      ->take_all()
      ->expected(1)
      ->allow_extra_args(false);
}

// -o may stand several times: one results in several forms.
void add_outputs(CLI::App& sub, std::vector<std::string>& outputs) {
  sub.add_option("-o,--output", outputs, "Results file, .json, .csv or .html; may be repeated")
      ->take_all()
      ->expected(1)
      ->allow_extra_args(false);
}

void add_record(CLI::App& app, command_line& line) {
  auto& c = line.record;
  auto& o = c.options;
  auto* sub = app.add_subcommand("record", "Run a model and write a trace");
  sub->add_option("--model", c.model_directory, "Hugging Face directory (config.json, safetensors)")
      ->required();
  sub->add_option("--tokens", c.tokens_file, "Token ids, decimal, separated by white space")
      ->required();
  sub->add_option("-o,--output", c.output, "The trace to write")->required();
  sub->add_option("--prompt-length", o.prompt_length,
                  "Positions that are the prompt; the rest is teacher-forced");
  sub->add_option("--generate", o.generate, "All tokens are the prompt; generate N more");
  sub->add_option("--temperature", o.temperature, "Of --generate; 0 is greedy")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  sub->add_option("--seed", o.seed, "Of --generate")->capture_default_str();
  sub->add_option("--kv-dtype", c.kv_dtype,
                  "fp16: q, k, v are rounded before attention; fp32: only the stored copy is")
      ->check(CLI::IsMember({"fp16", "fp32"}))
      ->capture_default_str();
  sub->add_option("--logits", c.logits, "stats: confidence only; full: whole rows, float32")
      ->check(CLI::IsMember({"stats", "full"}))
      ->capture_default_str();
  sub->add_option("--attention", c.attention, "Probability rows: none, full or every=k")
      ->capture_default_str();
  sub->add_option("--layers", o.layers, "Layers to record, e.g. 0,6,12 [all]")->delimiter(',');
  sub->add_option("--with", c.with, "More datasets: wo, value_norm, residual")
      ->delimiter(',')
      ->check(CLI::IsMember({"wo", "value_norm", "residual"}));
  sub->add_option("--rows", c.rows, "decode: q, o, lse from 64 positions before the decode on")
      ->check(CLI::IsMember({"all", "decode"}))
      ->capture_default_str();
  sub->add_option("--block", o.block, "Positions per pass of a teacher-forced recording")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  sub->add_option("--flush-every", o.flush_every, "Positions between flushes of --generate")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  sub->footer(
      "Example:\n  kvreplay record --model SmolLM2 --tokens text.tokens --prompt-length 512 -o "
      "run.h5");
  add_common(*sub, line.common);
  add_device(*sub, line.common);
}

void add_synth(CLI::App& app, command_line& line) {
  auto& c = line.synth;
  auto& o = c.options;
  auto* sub = app.add_subcommand("synth", "Write a synthetic trace, without a model");
  sub->add_option("-o,--output", c.output, "The trace to write")->required();
  sub->add_option("--layers", o.layers, "Layers")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  sub->add_option("--heads", c.heads, "Query heads / KV heads")->capture_default_str();
  sub->add_option("--head-dim", o.head_dim, "Channels of q and k")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  sub->add_option("--value-dim", o.value_dim, "Channels of v [as --head-dim]")
      ->check(CLI::Range(1, 256));
  sub->add_option("--prompt-length", o.prompt_length, "Positions of the prompt")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  sub->add_option("--tokens", o.tokens, "Positions in all")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  sub->add_option("--sequences", o.sequences, "Sequences")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  sub->add_option("--seed", o.seed, "The same seed gives the same trace")->capture_default_str();
  sub->add_option("--sink", o.sink, "Strength of the sink at position 0, nats")
      ->check(CLI::Range(0.0, 50.0))
      ->capture_default_str();
  sub->add_option("--heavy-share", o.heavy_share, "Share of positions that keep drawing attention")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  sub->add_option("--heavy", o.heavy, "Their strength, nats")
      ->check(CLI::Range(0.0, 50.0))
      ->capture_default_str();
  sub->add_option("--drift", o.drift, "How fast the queries' direction moves per step")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  sub->add_option("--locality", o.locality, "Nats lost per position of distance")
      ->check(CLI::Range(0.0, 10.0))
      ->capture_default_str();
  sub->add_option("--window", o.window,
                  "Attention window of each layer, e.g. 0,64,0,64; 0 = global")
      ->delimiter(',');
  sub->add_option("--with", c.with,
                  "More datasets: sinks, value_norm, retention, residual, wo, attention")
      ->delimiter(',')
      ->check(CLI::IsMember({"sinks", "value_norm", "retention", "residual", "wo", "attention"}));
  sub->footer("Example:\n  kvreplay synth -o s.h5 --layers 4 --heads 8/2 --tokens 512 --seed 1");
  add_common(*sub, line.common);
}

void add_inspect(CLI::App& app, command_line& line) {
  auto& c = line.inspect;
  auto* sub = app.add_subcommand("inspect", "What a trace holds, and whether it keeps the rules");
  sub->add_option("trace", c.trace, "The trace")->required();
  sub->add_flag("--check", c.check, "Verify every rule; recompute o and lse on a sample of rows");
  sub->add_flag("--all", c.all, "With --check: every row")->needs("--check");
  sub->add_flag("--recover", c.recover, "Read an unfinished recording up to its last whole step");
  sub->footer("Example:\n  kvreplay inspect run.h5 --check --all");
  add_common(*sub, line.common);
}

void add_policies(CLI::App& app, command_line& line) {
  auto* sub = app.add_subcommand("policies", "The catalogue, or one policy's manual page");
  sub->add_option("name", line.policies.name, "A policy or modifier");
  sub->footer("Example:\n  kvreplay policies confkv");
}

void add_replay(CLI::App& app, command_line& line) {
  auto& c = line.replay;
  auto* sub = app.add_subcommand("replay", "Run policies over traces and score them");
  sub->add_option("traces", c.traces, "Traces")->required();
  add_specs(*sub, c.policies, "SPEC: name:key=value,key=value+modifier:key=value");
  add_outputs(*sub, c.outputs);
  sub->add_option("--model", c.model_directory,
                  "The recorded model (Hugging Face directory): closed loop beside the open one");
  sub->add_option("--mode", c.mode, "open, closed or both [both with --model, else open]")
      ->check(CLI::IsMember({"open", "closed", "both"}));
  sub->add_flag("--sequential", c.sequential, "Closed loop token by token: --block 1 for it");
  sub->add_option("--free-run", c.free_run,
                  "Closed loop: each policy writes N tokens of its own after the prompt")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24));
  sub->add_option("--temperature", c.temperature, "Of --free-run; 0 is greedy")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  sub->add_option("--seed", c.seed, "Of --free-run")->capture_default_str();
  sub->add_option("--kv-dtype", c.kv_dtype,
                  "Closed loop: fp16 as deployed, or fp32, which rounds nothing (checks)")
      ->check(CLI::IsMember({"fp16", "fp32"}))
      ->capture_default_str();
  sub->add_option(
      "--fidelity", c.fidelity_file,
      "A file of kvreplay fidelity: how far these scores can be trusted, in the report");
  sub->add_option("--match-bytes", c.match_bytes,
                  "Scale every budget until mean bytes equal this SPEC's, or this size (64MiB)");
  sub->add_flag("--no-bound", c.no_bound, "Skip recall_bound: a step then costs O(budget)");
  sub->add_option("--skip", c.skip, "Leave the first N decode steps out of the metrics")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str();
  sub->add_option("--block", c.block, "Steps per pass; results do not depend on it")
      ->check(CLI::Range(1, 65536))
      ->capture_default_str();
  sub->add_flag("--recover", c.recover, "Read unfinished recordings up to their last whole step");
  sub->add_flag("--resume", c.resume, "Keep finished rows of an interrupted run of this command");
  sub->add_option("--steps", c.steps_file, "CSV: bytes, entries, confidence, quality per step");
  sub->add_option("--heads", c.heads_file, "CSV: entries and quality per layer and KV head");
  sub->add_option("--kept", c.kept_file, "CSV: the positions kept after every step");
  sub->footer(
      "Example:\n  kvreplay replay run.h5 -p full -p h2o:budget=256 -p confkv+int8 --match-bytes "
      "window:budget=512");
  add_common(*sub, line.common);
  add_device(*sub, line.common);
}

void add_sweep(CLI::App& app, command_line& line) {
  auto& c = line.sweep;
  auto* sub = app.add_subcommand("sweep", "Run grids of policies and mark the Pareto front");
  sub->add_option("traces", c.traces, "Traces")->required();
  add_specs(*sub, c.policies, "SPEC with lists and ranges: tau=0.3..0.9..0.05, high=128/256/512");
  add_outputs(*sub, c.outputs);
  sub->add_option("--model", c.model_directory,
                  "The recorded model (Hugging Face directory): closed loop beside the open one");
  sub->add_option("--mode", c.mode, "open, closed or both [both with --model, else open]")
      ->check(CLI::IsMember({"open", "closed", "both"}));
  sub->add_option("--quality", c.quality,
                  "Metric of the Pareto front [kl_proxy, residual_rel_l2 or output_rel_l2, the "
                  "first that all rows have]");
  sub->add_option("--batch-points", c.batch_points, "Points that share one pass over a trace")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  sub->add_option("--shard", c.shard, "i/n: only the i-th of n parts, for job arrays");
  sub->add_option("--skip", c.skip, "Leave the first N decode steps out of the metrics")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 40))
      ->capture_default_str();
  sub->add_flag("--no-bound", c.no_bound, "Skip recall_bound: a step then costs O(budget)");
  sub->add_flag("--recover", c.recover, "Read unfinished recordings up to their last whole step");
  sub->add_flag("--resume", c.resume, "Keep finished rows of an interrupted run of this command");
  sub->footer(
      "Example:\n  kvreplay sweep run.h5 -p confkv:tau=0.3..0.9..0.1,high=128/256 -o sweep.json");
  add_common(*sub, line.common);
  add_device(*sub, line.common);
}

void add_survival(CLI::App& app, command_line& line) {
  auto& c = line.survival;
  auto* sub = app.add_subcommand("survival", "How long entries go on drawing attention");
  sub->add_option("trace", c.trace, "The trace")->required();
  sub->add_option("-o,--output", c.output, "CSV: layer, kv_head, age, alive, seen, beta");
  sub->footer("Example:\n  kvreplay survival run.h5 -o survival.csv");
  add_common(*sub, line.common);
}

void add_headscore(CLI::App& app, command_line& line) {
  auto& c = line.headscore;
  auto* sub = app.add_subcommand("headscore", "Measure HeadKV's table of heads on needle probes");
  sub->add_option("traces", c.traces, "Traces whose sequences have a span `needle`")->required();
  sub->add_option("-o,--output", c.output, "JSON that headkv:table= reads")->required();
  sub->footer("Example:\n  kvreplay headscore needles.h5 -o heads.json");
  add_common(*sub, line.common);
}

void add_fit_retention(CLI::App& app, command_line& line) {
  auto& c = line.fit_retention;
  auto* sub = app.add_subcommand("fit-retention", "Learn TrimKV's retention gates from a trace");
  sub->add_option("trace", c.trace, "The trace to learn from")->required();
  sub->add_option("-o,--output", c.output, "A copy of it, with `retention` and the gate")
      ->required();
  sub->add_option("--projection", c.projection, "Output projections: one in all, a layer or a head")
      ->check(CLI::IsMember({"shared", "layer", "head"}))
      ->capture_default_str();
  sub->add_option("--hidden", c.hidden, "Hidden units of a head's gate")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  sub->add_option("--epochs", c.epochs, "Passes over the entries")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  sub->add_option("--train-share", c.train_share,
                  "Of the sequences (of one: its positions); the rest is held out")
      ->check(CLI::Range(0.01, 0.99))
      ->capture_default_str();
  sub->add_option("--seed", c.seed, "The same seed gives the same gates")->capture_default_str();
  sub->footer("Example:\n  kvreplay fit-retention run.h5 -o run-retention.h5");
  add_common(*sub, line.common);
}

void add_time(CLI::App& app, command_line& line) {
  auto& c = line.time;
  auto* sub = app.add_subcommand("time", "Time the kernels on a policy's real lengths");
  sub->add_option("trace", c.trace, "The trace whose shapes and lengths are run")->required();
  add_specs(*sub, c.policies, "SPEC: name:key=value,key=value+modifier:key=value");
  sub->add_option("--batch", c.batch, "Sequences at once, e.g. 1,2,4,8: a row for each")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  sub->add_option("--repeat", c.repeat, "Rounds over the trace; more where it gives few samples")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  add_outputs(*sub, c.outputs);
  sub->footer(
      "Example:\n  kvreplay time run.h5 -p full -p confkv -p confkv+int8 --batch 1,8 -o "
      "times.json");
  add_common(*sub, line.common);
  add_device(*sub, line.common);
}

void add_probe(CLI::App& app, command_line& line) {
  auto& c = line.probe;
  auto* sub = app.add_subcommand("probe", "Does confidence say how much a step needs its past?");
  sub->add_option("traces", c.traces, "Traces, of whose tokens the model is run")->required();
  sub->add_option("--model", c.model_directory, "The recorded model (Hugging Face directory)")
      ->required();
  sub->add_option("--hidden", c.hidden, "How many positions before a step are hidden from it")
      ->delimiter(',')
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  sub->add_option("-o,--output", c.output, "JSON: correlations and every point");
  sub->footer("Example:\n  kvreplay probe run.h5 --model SmolLM2 --hidden 16,64 -o probe.json");
  add_common(*sub, line.common);
}

void add_fidelity(CLI::App& app, command_line& line) {
  auto& c = line.fidelity;
  auto* sub = app.add_subcommand("fidelity", "How well open-loop scores order policies");
  sub->add_option("inputs", c.inputs, "Traces, or results (.json) of replay --mode both")
      ->required();
  sub->add_option("-p,--policy", c.policies, "SPEC, over traces; at least three beside full")
      ->take_all()
      ->expected(1)
      ->allow_extra_args(false);
  sub->add_option("--model", c.model_directory, "The recorded model, over traces");
  sub->add_option("-o,--output", c.outputs, "JSON: rank correlations and inversions")
      ->take_all()
      ->expected(1)
      ->allow_extra_args(false);
  sub->footer(
      "Example:\n  kvreplay fidelity run.h5 --model SmolLM2 -p h2o:budget=256 -p tova:budget=256 "
      "-p "
      "streaming:budget=256 -o fidelity.json");
  add_common(*sub, line.common);
}

void add_tune(CLI::App& app, command_line& line) {
  auto& c = line.tune;
  auto* sub = app.add_subcommand("tune", "Find the best point of a grid under a limit");
  sub->add_option("traces", c.traces, "Traces")->required();
  add_specs(*sub, c.policies, "SPEC with lists and ranges: tau=0.3..0.9..0.05, high=128/256/512");
  sub->add_option("--max-bytes", c.max_bytes, "Limit on mean bytes of a sequence, such as 64MiB");
  sub->add_option("--max-ratio", c.max_ratio, "Limit on bytes over the full FP16 cache's")
      ->check(CLI::Range(0.0, 10.0));
  sub->add_option("--min-recall", c.min_recall, "Least attention recall; then bytes are minimised")
      ->check(CLI::Range(0.0, 1.0));
  sub->add_option("--max-kl", c.max_kl, "Largest logit_kl, nats, with --model; bytes are minimised")
      ->check(CLI::Range(0.0, 1e6));
  sub->add_option(
      "--model", c.model_directory,
      "The recorded model: the best are checked, and --max-kl measured, in closed loop");
  sub->add_option("--quality", c.quality,
                  "Metric made best under a limit on bytes [kl_proxy, residual_rel_l2 or "
                  "output_rel_l2, the first that the traces allow]");
  sub->add_option("--evaluations", c.evaluations, "Points that may be tried")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  sub->add_option("--holdout", c.holdout, "Traces that take no part: the best are checked on them");
  add_outputs(*sub, c.outputs);
  sub->footer(
      "Example:\n  kvreplay tune a.h5 b.h5 -p confkv:tau=0.3..0.9..0.05,high=128..512..64 "
      "--max-ratio 0.25 --holdout c.h5");
  add_common(*sub, line.common);
  add_device(*sub, line.common);
}

void add_report(CLI::App& app, command_line& line) {
  auto& c = line.report;
  auto* sub = app.add_subcommand("report", "One HTML page of results files: table and charts");
  sub->add_option("results", c.results, "Results files, .json")->required();
  sub->add_option("-o,--output", c.output, "The page to write, .html")->required();
  sub->footer("Example:\n  kvreplay report window.json h2o.json times.json -o report.html");
}

int dispatch(const CLI::App& app, const command_line& line) {
  if (app.got_subcommand("record")) return run_record(line.common, line.record);
  if (app.got_subcommand("synth")) return run_synth(line.common, line.synth);
  if (app.got_subcommand("inspect")) return run_inspect(line.common, line.inspect);
  if (app.got_subcommand("policies")) return run_policies(line.policies);
  if (app.got_subcommand("sweep")) return run_sweep(line.common, line.sweep);
  if (app.got_subcommand("tune")) return run_tune(line.common, line.tune);
  if (app.got_subcommand("survival")) return run_survival(line.common, line.survival);
  if (app.got_subcommand("headscore")) return run_headscore(line.common, line.headscore);
  if (app.got_subcommand("fit-retention")) {
    return run_fit_retention(line.common, line.fit_retention);
  }
  if (app.got_subcommand("report")) return run_report(line.report);
  if (app.got_subcommand("probe")) return run_probe(line.common, line.probe);
  if (app.got_subcommand("fidelity")) return run_fidelity(line.common, line.fidelity);
  if (app.got_subcommand("time")) return run_time(line.common, line.time);
  return run_replay(line.common, line.replay);
}

// One line for a person: names from files can hold anything.
int complain(const char* what, int code) {
  fmt::print(stderr, "kvreplay: {}\n",
             kvreplay::reports::escape_bytes(what, kvreplay::reports::controls::none));
  return code;
}

// An exception as a line and an exit code.
int explain(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const usage_error& e) {
    return complain(e.what(), exit_usage);
  } catch (const kvreplay::policies::spec_error& e) {
    return complain(e.what(), exit_usage);
  } catch (const std::exception& e) {
    return complain(e.what(), exit_failed);
  }
}

// --config FILE.toml, before or behind the command: a table per command, keys as the long options.
void add_config(CLI::App& app) {
  app.set_config("--config")
      ->description("Options from a TOML file, a table per command; the command line wins");
  app.allow_config_extras(CLI::config_extras_mode::error);
  for (auto* sub : app.get_subcommands({})) sub->fallthrough();
}

// What is wrong with a --config file, in our words: CLI11 names the key alone.
std::string config_complaint(const CLI::App& app, const std::string& what) {
  const auto at = what.rfind(' ');
  const std::string key = at == std::string::npos ? what : what.substr(at + 1);
  const auto dot = key.find('.');
  const std::string table = key.substr(0, dot);
  std::vector<std::string> names;
  const CLI::App* command = nullptr;
  for (const auto* sub : app.get_subcommands({})) {
    if (sub->get_name() == table) command = sub;
  }
  if (dot == std::string::npos) {
    return fmt::format(
        "--config: cannot read '{}'; expected a TOML table per command, [replay], and "
        "key = value below it",
        key);
  }
  if (command == nullptr) {
    for (const auto* sub : app.get_subcommands({})) names.push_back(sub->get_name());
  } else {
    for (const auto* option : command->get_options()) {
      const auto& longs = option->get_lnames();
      names.push_back(longs.empty() ? option->get_name() : longs.front());
    }
  }
  const std::vector<std::string_view> known(names.begin(), names.end());
  const std::string word = command == nullptr ? table : key.substr(dot + 1);
  return fmt::format("--config: unknown {} '{}'{}", command == nullptr ? "command" : "key", word,
                     kvreplay::policies::did_you_mean(word, known));
}

// A misspelt option leaves another one missing: what was not understood comes first.
std::string parse_complaint(const CLI::App& app, const CLI::ParseError& e) {
  for (const auto* command : app.get_subcommands()) {
    for (const auto& word : app.remaining(true)) {
      if (!word.starts_with("--")) continue;
      std::vector<std::string> names;
      for (const auto* option : command->get_options()) {
        for (const auto& name : option->get_lnames()) names.push_back(fmt::format("--{}", name));
      }
      const std::vector<std::string_view> known(names.begin(), names.end());
      const auto given = word.substr(0, word.find('='));
      return fmt::format("{}: unknown option '{}'{}", command->get_name(), given,
                         kvreplay::policies::did_you_mean(given, known));
    }
  }
  return fmt::format("{} (see kvreplay --help)", e.what());
}

std::string shell_word(const std::string& text) {
  constexpr std::string_view safe =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=:,./%@";
  if (!text.empty() && text.find_first_not_of(safe) == std::string::npos) return text;
  std::string out;
  for (const char c : text) {
    if (c == '\'') out += "'\\'";
    out += c;
  }
  return fmt::format("'{}'", out);
}

// The command as it would be typed without a --config: what a results file keeps.
std::string effective_command(const CLI::App& app) {
  std::string out = "kvreplay";
  for (const auto* sub : app.get_subcommands()) {
    out += fmt::format(" {}", sub->get_name());
    for (const auto* option : sub->get_options()) {
      if (option->count() == 0) continue;
      const bool flag = option->get_expected_max() == 0;
      const bool positional = option->get_positional();
      for (const auto& value : option->results()) {
        if (!positional) out += fmt::format(" --{}", option->get_lnames().front());
        if (flag) break;
        out += fmt::format(" {}", shell_word(value));
      }
    }
  }
  return out;
}

int parse_and_run(int argc, char** argv) {
  command_line line;
  CLI::App app("Record a decode once, replay any KV-cache policy over it, score bytes and quality.",
               "kvreplay");
  app.set_version_flag("--version", version_text);
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  add_record(app, line);
  add_synth(app, line);
  add_inspect(app, line);
  add_policies(app, line);
  add_replay(app, line);
  add_sweep(app, line);
  add_survival(app, line);
  add_headscore(app, line);
  add_fit_retention(app, line);
  add_time(app, line);
  add_tune(app, line);
  add_report(app, line);
  add_probe(app, line);
  add_fidelity(app, line);
  add_config(app);
  try {
    app.parse(argc, argv);
    line.common.command_line = effective_command(app);
  } catch (const CLI::Success& e) {
    return app.exit(e);
  } catch (const CLI::ConfigError& e) {
    return complain(config_complaint(app, e.what()).c_str(), exit_usage);
  } catch (const CLI::ParseError& e) {
    return complain(parse_complaint(app, e).c_str(), exit_usage);
  }
  ranks_session ranks;
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  const int threads = line.common.threads > 0 ? line.common.threads
                                              : std::max(1, cores / this_rank().on_this_machine);
  line.common.threads = threads;
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism,
                                  static_cast<size_t>(threads));
  try {
    return dispatch(app, line);
  } catch (...) {
    // What fails on every rank is told once, by rank 0, which then ends the others.
    if (this_rank().rank != 0) std::this_thread::sleep_for(std::chrono::milliseconds(500));
    const int code = explain(std::current_exception());
    ranks.abort(code);
    return code;
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return parse_and_run(argc, argv);
  } catch (...) {
    return explain(std::current_exception());
  }
}
