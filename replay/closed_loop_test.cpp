// The closed loop on small models: the same bits for every block size, batch and thread count;
// decisions that depend on nothing but steps up to their own; the full cache against itself.
#include "replay/closed_loop.hpp"

#include <doctest/doctest.h>
#include <tbb/global_control.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "policies/policy.hpp"
#include "replay/test_support.hpp"
#include "reports/result.hpp"
#include "tracer/model.hpp"
#include "tracer/record.hpp"
#include "traces/reader.hpp"
#include "traces/retention_gate.hpp"
#include "traces/writer.hpp"

namespace kvreplay::replay {
namespace {

std::string model_path(const std::string& name) {
  return std::string(KVREPLAY_SOURCE_DIR) + "/tracer/testdata/models/" + name;
}

// Ids that repeat at irregular distances, so that attention has something to find.
std::vector<std::int32_t> some_text(int vocabulary, int length) {
  std::vector<std::int32_t> out;
  for (int i = 0; i < length; ++i) out.push_back((i * i % 23 + i / 7 * 5) % vocabulary);
  return out;
}

struct recorded_run {
  temporary_folder folder;
  tracer::model model;
  std::string path = folder / "t.h5";

  explicit recorded_run(const std::string& name, std::int64_t prompt = 24, int length = 88,
                        bool confidence = true)
      : model(tracer::model::load(model_path(name))) {
    tracer::record_options options;
    options.tokens = some_text(model.config().vocab_size, length);
    options.prompt_length = prompt;
    options.full_logits = confidence;
    tracer::record(model, path, options, {});
  }
};

std::vector<policies::policy> parse_all(const std::vector<std::string>& specs) {
  std::vector<policies::policy> out;
  for (const auto& spec : specs) out.push_back(policies::parse_policy(spec));
  return out;
}

const std::vector<std::string>& specs() {
  static const std::vector<std::string> all{
      "full",
      "full+int8:window=8,scales=token",
      "window:budget=16",
      "streaming:budget=16,sinks=2",
      "random:budget=16,recent=4",
      "h2o:budget=16",
      "h2o:budget=30%,scope=layer",
      "tova:budget=16",
      "confkv:high=8,low=24,recent=4,tau=q0.5",
      "confkv:high=8,low=24,recent=4,tau=q0.5,shrink=2,hold=1,smooth=0.3",
      "confkv:high=8,low=24,recent=4,tau=q0.5,gate=inverted,shrink=1",
      "confkv:high=8,low=24,recent=4,tau=q0.4,temperature=1.5",
      "confkv:high=8,low=24,recent=4,gate=random",
      "confkv:high=8,low=24,recent=4,tau=q0.5,gate=shuffled",
      "confkv-l:high=10,low=24,recent=4,tau=q0.6+int8:window=6",
      "h2o:budget=16+every:n=5",
      "snapkv:obs=4+every:n=1+confidence:high=8,low=24,tau=q0.5",
      "scissorhands:history=9,recent=4+confidence:high=8,low=24,tau=q0.5,shrink=2",
      "rkv:obs=3+every:n=3+confidence:high=8,low=24,tau=q0.5",
      "keydiff:budget=16+int8:window=6",
      "adakv:obs=4,budget=16+every:n=1+critical",
      "oracle:budget=16",
      "oracle:gqa=max+confidence:high=8,low=24,tau=q0.5",
      "h2o:budget=16+global:floor=3",
      "snapkv:obs=3+every:n=2+global+confidence:high=8,low=24,tau=q0.5",
      "h2o+critical+confidence:high=8,low=24,tau=q0.5",
      "window:budget=16+prefill"};
  return all;
}

// Everything but the times and the passes, which depend on the block size.
std::vector<std::string> differences_of(const std::vector<lane_output>& a,
                                        const std::vector<lane_output>& b) {
  reports::report left, right;
  for (const auto* side : {&a, &b}) {
    for (const auto& lane : *side) {
      auto row = lane.row;
      row.events.passes.reset();
      (side == &a ? left : right).runs.push_back(row);
    }
  }
  auto out = reports::differences(left, right);
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].dropped != b[i].dropped) out.push_back(a[i].row.policy + ": kept sets");
  }
  return out;
}

TEST_CASE("blocks of any size, batches and threads give the same bits") {
  for (const char* name : {"llama", "qwen2"}) {
    CAPTURE(name);
    const recorded_run run(name);
    const traces::reader trace(run.path);
    const auto policies = parse_all(specs());
    closed_loop_options options;
    options.kept = true;
    options.block = 1;
    const auto sequential = replay_closed(trace, 0, run.model, policies, options);
    for (const auto& lane : sequential) {
      REQUIRE_MESSAGE(lane.row.status == "ok", lane.row.note);
      if (lane.row.events.passes) CHECK(*lane.row.events.passes == 1);
    }
    double most_passes = 0;
    for (const std::int64_t block : {7, 16, 128}) {
      CAPTURE(block);
      options.block = block;
      const auto blocks = replay_closed(trace, 0, run.model, policies, options);
      CHECK(differences_of(sequential, blocks) == std::vector<std::string>{});
      for (const auto& lane : blocks) {
        most_passes = std::max(most_passes, lane.row.events.passes.value_or(0));
      }
    }
    CHECK(most_passes > 1);  // else nothing iterated and the test shows nothing
    std::vector<lane_output> alone;
    const tbb::global_control one(tbb::global_control::max_allowed_parallelism, 1);
    for (const auto& policy : policies) {
      alone.push_back(std::move(replay_closed(trace, 0, run.model, {&policy, 1}, options)[0]));
    }
    CHECK(differences_of(sequential, alone) == std::vector<std::string>{});
  }
}

TEST_CASE("the full cache against itself, and against the recording") {
  const recorded_run run("llama3_scaled");
  const traces::reader trace(run.path);
  const auto policies = parse_all({"full", "window:budget=1000", "window:budget=4"});
  const auto lanes = replay_closed(trace, 0, run.model, policies, {});
  const auto& info = trace.sequence(0);
  const auto tokens = trace.tokens(0);
  double nll = 0;
  for (std::int64_t t = info.n_prompt; t + 1 < info.n_tokens; ++t) {
    const auto row = trace.logits(0, t - info.n_prompt + 1, t - info.n_prompt + 2);
    double sum = 0;
    for (int i = 0; i < trace.model().vocab_size; ++i)
      sum += std::exp(double{row[static_cast<size_t>(i)]});
    nll += std::log(sum) - row[static_cast<size_t>(tokens[static_cast<size_t>(t + 1)])];
  }
  const auto& full = lanes[0].row;
  CHECK(*full.quality.logit_kl == 0);
  CHECK(*full.quality.logit_kl_p99 == 0);
  CHECK(*full.quality.top1_agreement == 1);
  CHECK(*full.quality.ppl_delta == 0);
  CHECK(full.tokens.scored == 63);
  CHECK(*full.quality.ppl == doctest::Approx(std::exp(nll / 63)).epsilon(1e-5));
  CHECK(*full.memory.memory_ratio == 1);
  // The recording's own logits are a cross-check, of the reference and not of the policy.
  for (const auto& lane : lanes) {
    const auto at = lane.row.note.find("recorded logits: KL ");
    REQUIRE_MESSAGE(at != std::string::npos, lane.row.note);
    CHECK(std::stod(lane.row.note.substr(at + 20)) < 1e-9);
  }
  // Kept whole by a cache of its own: another order of sums, nothing else.
  CHECK(*lanes[1].row.quality.logit_kl < 1e-7);
  CHECK(*lanes[1].row.memory.mean_bytes == *full.memory.mean_bytes);
  CHECK(*lanes[2].row.quality.logit_kl > 1e-4);
  CHECK(*lanes[2].row.memory.mean_entries == 5);
}

TEST_CASE("free running: full writes what record --generate writes; others leave it") {
  const recorded_run run("llama");
  const traces::reader trace(run.path);
  for (const double temperature : {0.0, 0.8}) {
    tracer::record_options generate;
    const auto tokens = trace.tokens(0);
    generate.tokens.assign(tokens.begin(), tokens.begin() + 24);
    generate.generate = 40;
    generate.temperature = temperature;
    generate.seed = 3;
    const auto recorded = run.folder / "g.h5";
    tracer::record(run.model, recorded, generate, {});
    const traces::reader generated(recorded);
    const auto text = generated.tokens(0);
    // Teacher-forced on that text, `full` gives its confidence; the free run must see the same.
    closed_loop_options options;
    const auto forced = replay_closed(generated, 0, run.model, parse_all({"full"}), options);
    options.free = {40, temperature, 3};
    const auto policies = parse_all(
        {"full", "window:budget=1000", "window:budget=2", "confkv:high=4,low=12,recent=2"});
    const auto lanes = replay_closed(trace, 0, run.model, policies, options);
    CHECK(*lanes[0].row.confidence.mean == *forced[0].row.confidence.mean);
    CHECK(*lanes[0].row.quality.free_agreement == 1);
    CHECK(*lanes[0].row.quality.free_prefix == 40);
    CHECK(*lanes[1].row.quality.free_agreement == 1);
    CHECK(*lanes[2].row.quality.free_agreement < 1);
    CHECK(*lanes[2].row.quality.free_prefix < 40);
    CHECK_FALSE(lanes[2].row.quality.ppl);
    for (size_t i = 0; i < policies.size(); ++i) {
      REQUIRE_MESSAGE(lanes[i].row.status == "ok", lanes[i].row.note);
      const auto alone = replay_closed(trace, 0, run.model, {&policies[i], 1}, options);
      CHECK(differences_of({lanes[i]}, alone) == std::vector<std::string>{});
    }
  }
  closed_loop_options options;
  options.free.tokens = 8;
  const auto future = replay_closed(trace, 0, run.model,
                                    parse_all({"confkv:high=4,low=12,recent=2,tau=q0.5"}), options);
  CHECK(future[0].row.status == "failed");
  CHECK(future[0].row.note.find("a free run does not follow") != std::string::npos);
}

TEST_CASE("a run that is killed goes on from its snapshot and gives the same rows") {
  const recorded_run run("llama");
  const traces::reader trace(run.path);
  // Those whose scores a kernel keeps: what rules on the host remember is in no snapshot.
  const auto policies =
      parse_all({"full", "full+int8:window=8,scales=channel", "random:budget=16,recent=4",
                 "h2o:budget=16+int4:window=8", "tova:budget=16+paged:page=4", "h2o:budget=16",
                 "confkv:high=8,low=24,recent=4,shrink=1", "h2o:budget=16+global:floor=3",
                 "h2o:budget=16+every:n=5"});
  for (const std::int64_t free : {0, 40}) {
    closed_loop_options options;
    options.block = 16;
    options.free.tokens = free;
    const auto whole = replay_closed(trace, 0, run.model, policies, options);
    options.snapshot = run.folder / "s";
    options.snapshot_seconds = 0;
    struct killed {};
    options.progress = [](std::int64_t done, std::int64_t total) {
      if (done > total * 2 / 3) throw killed();
    };
    CHECK_THROWS_AS(replay_closed(trace, 0, run.model, policies, options), killed);
    options.resume = true;
    std::int64_t first = 0;
    options.progress = [&](std::int64_t done, std::int64_t total) {
      if (first == 0) first = 100 * done / total;
    };
    const auto resumed = replay_closed(trace, 0, run.model, policies, options);
    CHECK(first > 50);
    CHECK(differences_of(whole, resumed) == std::vector<std::string>{});
    const auto size = std::filesystem::file_size(options.snapshot);
    std::filesystem::resize_file(options.snapshot, size / 2);
    CHECK_THROWS_AS(replay_closed(trace, 0, run.model, policies, options), traces::trace_error);
    // Of another command: not taken.
    first = 0;
    const auto other = replay_closed(trace, 0, run.model, {&policies[5], 1}, options);
    CHECK(differences_of({whole[5]}, other) == std::vector<std::string>{});
    CHECK(first < 50);
    std::filesystem::remove(options.snapshot);
  }
}

TEST_CASE("what is refused, by name; the others go on") {
  const recorded_run run("llama", 24, 60, false);
  const traces::reader trace(run.path);
  const auto other = tracer::model::load(model_path("qwen2"));
  std::string why;
  try {
    replay_closed(trace, 0, other, {}, {});
  } catch (const traces::trace_error& e) {
    why = e.what();
  }
  CHECK(why.find("recorded with another model than qwen2: query heads 6, expected 7") !=
        std::string::npos);
  const auto policies = parse_all({"confkv:high=8,low=24,recent=4,tau=0.5,temperature=2",
                                   "confkv:high=8,low=24,recent=4,tau=q0.5,temperature=2"});
  const auto lanes = replay_closed(trace, 0, run.model, policies, {});
  CHECK(lanes[0].row.status == "ok");  // its own logits serve; the trace has none
  CHECK(lanes[1].row.status == "failed");
  CHECK(lanes[1].row.note.find("logits") != std::string::npos);
}

// A gate that gives every entry the same decay ranks by age: trimkv is window then, although the
// recorded retention says the opposite. Without the gate the recording is believed.
TEST_CASE("a trace's retention gate is asked about the lane's own keys and values") {
  const recorded_run run("llama");
  const auto& m = run.model.config();
  const traces::reader trace(run.path);
  const auto& info = trace.sequence(0);
  traces::retention_gate gate;
  gate.layers = m.n_layers;
  gate.kv_heads = m.n_kv_heads;
  gate.head_dim = gate.value_dim = m.head_dim;
  gate.hidden = 1;
  const auto heads = static_cast<size_t>(m.n_layers * m.n_kv_heads);
  const auto inputs = heads * static_cast<size_t>(2 * m.head_dim);
  gate.input_mean.assign(inputs, 0);
  gate.input_scale.assign(inputs, 1);
  gate.hidden_weight.assign(inputs, 0);
  gate.hidden_bias.assign(heads, 0);
  gate.output_weight = {0};
  gate.output_bias = {2};
  std::vector<float> rising;  // the newer, the sooner it goes
  for (std::int64_t t = 0; t < info.n_tokens; ++t) {
    for (int g = 0; g < m.n_kv_heads; ++g) rising.push_back(-static_cast<float>(t * t));
  }
  const std::vector<std::vector<std::vector<float>>> rows = {
      std::vector<std::vector<float>>(static_cast<size_t>(m.n_layers), rising)};
  const auto gated = run.folder / "gated.h5";
  traces::copy_with_retention(run.path, gated, rows, gate);
  const auto policies = parse_all({"trimkv:budget=16", "window:budget=16"});
  const traces::reader with_gate(gated);
  for (const std::int64_t block : {1, 9, 128}) {
    closed_loop_options options;
    options.block = block;
    const auto lanes = replay_closed(with_gate, 0, run.model, policies, options);
    REQUIRE_MESSAGE(lanes[0].row.status == "ok", lanes[0].row.note);
    CHECK(lanes[0].row.note.find("gate") != std::string::npos);
    CHECK(*lanes[0].row.quality.logit_kl == *lanes[1].row.quality.logit_kl);
    CHECK(*lanes[0].row.quality.ppl == *lanes[1].row.quality.ppl);
  }
}

}  // namespace
}  // namespace kvreplay::replay
