// Does the cost of a step follow the budget, and what do more policies in one pass cost? One
// synthetic trace, cut to 512 and to 4,096 positions, through the open loop without the bound.
//   open_loop_bench --benchmark_counters_tabular=true
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <tbb/global_control.h>

#include <filesystem>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "policies/policy.hpp"
#include "replay/open_loop.hpp"
#include "traces/reader.hpp"
#include "traces/synth.hpp"
#include "traces/writer.hpp"

namespace kvreplay::replay {
namespace {

constexpr std::int64_t prompt = 256, longest = 4096;

std::filesystem::path folder() {
  return std::filesystem::temp_directory_path() / "kvreplay_open_loop_bench";
}

// The first n positions of a trace as a trace of its own.
void write_cut(const traces::reader& whole, const std::string& path, std::int64_t n) {
  traces::writer out(path, whole.model(), "open_loop_bench");
  traces::sequence_plan plan;
  plan.n_prompt = prompt;
  plan.n_tokens = n;
  plan.confidence = true;
  const auto& positions = whole.sequence(0).logit_pos;
  for (const auto t : positions) {
    if (t < n) plan.logit_pos.push_back(t);
  }
  out.begin_sequence(plan);
  auto tokens = whole.tokens(0);
  tokens.resize(static_cast<size_t>(n));
  out.put_tokens(0, tokens);
  auto confidence = whole.confidence(0);
  confidence.resize(4 * plan.logit_pos.size());
  out.put_confidence(0, confidence);
  for (const int layer : whole.model().layers) {
    const auto slice = whole.read_layer(0, layer, 0, n);
    out.put_q(layer, 0, slice.q);
    out.put_k(layer, 0, slice.k);
    out.put_v(layer, 0, slice.v);
    out.put_o(layer, 0, slice.o);
    out.put_lse(layer, 0, slice.lse);
  }
  out.commit(n);
  out.end_sequence();
  out.finish();
}

// SmolLM2's shape: 9 query heads on 3 KV heads of 64 channels. Made once per run of the program.
const traces::reader& trace_of(std::int64_t n) {
  static std::map<std::int64_t, std::unique_ptr<traces::reader>> traces;
  auto& known = traces[n];
  if (known) return *known;
  std::filesystem::create_directories(folder());
  const auto whole_path = (folder() / "4096.h5").string();
  if (n == longest) {
    traces::synth_options options;
    options.layers = 2;
    options.q_heads = 9;
    options.kv_heads = 3;
    options.head_dim = 64;
    options.prompt_length = prompt;
    options.tokens = longest;
    options.logits = false;
    traces::synth(whole_path, options);
    known = std::make_unique<traces::reader>(whole_path);
  } else {
    const auto path = (folder() / fmt::format("{}.h5", n)).string();
    write_cut(trace_of(longest), path, n);
    known = std::make_unique<traces::reader>(path);
  }
  // Nothing is timed on a trace that does not reproduce its own outputs.
  const auto full = policies::parse_policy("full");
  open_loop_options options;
  options.bound = false;
  const auto row = replay_open(*known, 0, {&full, 1}, options)[0].row;
  if (row.status != "ok" || !(*row.quality.output_rel_l2 < 1e-3) ||
      !(*row.quality.attention_recall > 1 - 1e-4)) {
    throw std::runtime_error(
        fmt::format("{}: full does not reproduce the trace: {}", known->path(), row.note));
  }
  return *known;
}

// n policies that differ a little, so that no two do the same work.
std::vector<policies::policy> policies_of(std::int64_t n) {
  std::vector<policies::policy> out;
  for (std::int64_t i = 0; i < n; ++i) {
    out.push_back(policies::parse_policy(fmt::format("confkv:high=64,low={},recent=32", 128 + i)));
  }
  return out;
}

void run(benchmark::State& state, std::int64_t positions, std::int64_t policy_count) {
  const auto& trace = trace_of(positions);
  const auto policies = policies_of(policy_count);
  open_loop_options options;
  options.bound = false;
  for (auto _ : state) benchmark::DoNotOptimize(replay_open(trace, 0, policies, options));
  const auto steps = static_cast<double>((positions - prompt) * policy_count);
  const auto rounds = static_cast<double>(state.iterations());
  state.counters["time_per_step"] =
      benchmark::Counter(steps * rounds, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["steps_per_s"] = benchmark::Counter(steps * rounds, benchmark::Counter::kIsRate);
}

void cost_follows_budget(benchmark::State& state) { run(state, state.range(0), 1); }
void policies_in_one_pass(benchmark::State& state) { run(state, 512, state.range(0)); }

BENCHMARK(cost_follows_budget)->Arg(512)->Arg(4096)->Unit(benchmark::kMillisecond)->UseRealTime();
BENCHMARK(policies_in_one_pass)
    ->Arg(1)
    ->Arg(8)
    ->Arg(32)
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

}  // namespace
}  // namespace kvreplay::replay

int main(int argc, char** argv) {
  // One thread: what a step costs, not how many run at once.
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 1);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  std::error_code ignored;
  std::filesystem::remove_all(kvreplay::replay::folder(), ignored);
  return 0;
}
