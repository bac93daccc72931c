// What holds for every policy, over traces with grouped heads, windows, learned sinks, one layer
// and a prompt of one token, and budgets of 1, small, and above the length.
#include "replay/open_loop.hpp"

#include <doctest/doctest.h>
#include <tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "policies/policy.hpp"
#include "replay/policy_sets.hpp"
#include "replay/test_support.hpp"
#include "replay/trace_copy.hpp"
#include "reports/result.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

std::vector<std::string> specs_with(const std::string& budget) {
  std::vector<std::string> specs;
  for (const char* name : {"window", "streaming", "random:recent=2,", "h2o", "h2o:gqa=max,",
                           "h2o:scope=layer,", "tova"}) {
    std::string spec = name;
    spec += spec.find(':') == std::string::npos ? ":" : "";
    specs.push_back(spec + "budget=" + budget);
  }
  return specs;
}

std::vector<std::string> all_specs() {
  auto specs = specs_with("12");
  for (const auto& more : specs_with("1")) specs.push_back(more);
  for (const auto& more : specs_with("30%")) specs.push_back(more);
  for (const char* spec :
       {"full", "confkv:high=8,low=20,recent=4", "confkv:high=8,low=20,recent=4,shrink=2,hold=1",
        "confkv:high=8,low=20,recent=4,mass=max,smooth=0.5,tau=q0.5",
        "confkv-l:high=8,low=20,recent=2", "confkv:high=8,low=20,recent=4,gate=random",
        "confkv:high=8,low=20,recent=4,gate=shuffled", "h2o:budget=12+every:n=4",
        "h2o:budget=12+int8:window=6", "confkv:high=8,low=20,recent=4+int8:window=6,scales=channel",
        "tova:budget=12+int8:window=6,scales=token", "window:budget=12+prefill"}) {
    specs.emplace_back(spec);
  }
  return specs;
}

const std::vector<trace_kind> kinds{trace_kind::grouped, trace_kind::windowed, trace_kind::sinks,
                                    trace_kind::one_layer, trace_kind::one_token_prompt};

// Held set within the previous one and the newcomer; newest held; recall below its bound.
void check_sets(const traces::reader& trace, const policies::policy& policy,
                const lane_output& lane) {
  const auto sets = kept_sets(trace, lane);
  const auto& info = trace.sequence(0);
  for (const auto& [key, positions] : sets) {
    const auto [step, layer, head] = key;
    CHECK(std::is_sorted(positions.begin(), positions.end()));
    CHECK_FALSE(positions.empty());
    CHECK(positions.back() <= step);
    if (policy.protect.recent >= 1) CHECK(positions.back() == step);
    if (step == info.n_prompt - 1) continue;
    auto possible = sets.at({step - 1, layer, head});
    possible.push_back(static_cast<std::int32_t>(step));
    CHECK(std::includes(possible.begin(), possible.end(), positions.begin(), positions.end()));
  }
  const auto& q = lane.row.quality;
  CHECK(*q.attention_recall <= *q.recall_bound + 1e-6);
}

TEST_CASE("properties of every policy on every kind of trace") {
  temporary_folder folder;
  int n = 0;
  for (const auto kind : kinds) {
    const auto path = folder / ("t" + std::to_string(n++) + ".h5");
    traces::synth(path, options_for(kind, 11));
    const traces::reader trace(path);
    const auto policies = parse_all(all_specs());
    open_loop_options options;
    options.kept = options.per_step = true;
    const auto lanes = replay_open(trace, 0, policies, options);
    for (size_t i = 0; i < lanes.size(); ++i) {
      CAPTURE(policies[i].spec);
      CAPTURE(static_cast<int>(kind));
      REQUIRE_MESSAGE(lanes[i].row.status == "ok", lanes[i].row.note);
      check_sets(trace, policies[i], lanes[i]);
      if (policies[i].trigger.every > 1 || policies[i].trigger.prefill_only) continue;
      const auto sets = kept_sets(trace, lanes[i]);
      for (const auto& step : lanes[i].steps) {
        if (!step.budget) continue;
        double held = 0, heads = 0;
        for (int layer : trace.model().layers) {
          for (int head = 0; head < trace.model().n_kv_heads; ++head, ++heads) {
            held += static_cast<double>(sets.at({step.step, layer, head}).size());
          }
        }
        CHECK(held / heads <= *step.budget + 1e-9);
      }
    }
  }
}

TEST_CASE("a budget above the length is full, bit for bit") {
  temporary_folder folder;
  for (const auto kind : kinds) {
    const auto path = folder / "t.h5";
    traces::synth(path, options_for(kind, 5));
    const traces::reader trace(path);
    for (const std::string precision : {"", "+int8:window=6", "+int8:window=6,scales=channel"}) {
      auto specs = specs_with("1000");
      specs.insert(specs.begin(), "full");
      specs.push_back("confkv:high=1000,low=1000");
      for (auto& spec : specs) spec += precision;
      const auto lanes = replay_open(trace, 0, parse_all(specs), {});
      for (const auto& lane : lanes) {
        CAPTURE(lane.row.policy);
        CHECK(*lane.row.quality.output_rel_l2 == *lanes[0].row.quality.output_rel_l2);
        CHECK(*lane.row.quality.attention_recall == *lanes[0].row.quality.attention_recall);
        CHECK(*lane.row.memory.mean_bytes == *lanes[0].row.memory.mean_bytes);
        CHECK(*lane.row.events.evicted == 0);
      }
      CHECK(*lanes[0].row.quality.attention_recall == doctest::Approx(1).epsilon(1e-5));
    }
  }
}

reports::report as_report(const std::vector<lane_output>& lanes) {
  reports::report report;
  for (const auto& lane : lanes) report.runs.push_back(lane.row);
  return report;
}

TEST_CASE("the same rows for any thread count, block size and company") {
  temporary_folder folder;
  const auto path = folder / "t.h5";
  auto made = options_for(trace_kind::windowed, 3);
  made.head_dim = 64;  // wide enough for the BLAS to take its fast code
  made.wo = made.residual = true;
  traces::synth(path, made);
  const traces::reader trace(path);
  const auto policies = parse_all(all_specs());
  const auto reference = as_report(replay_open(trace, 0, policies, {}));
  for (const int threads : {1, 2, 3}) {
    const tbb::global_control limit(tbb::global_control::max_allowed_parallelism,
                                    static_cast<size_t>(threads));
    CHECK(reports::differences(reference, as_report(replay_open(trace, 0, policies, {}))).empty());
  }
  for (const std::int64_t block : {1, 7, 1000}) {
    open_loop_options options;
    options.block = block;
    CHECK(reports::differences(reference, as_report(replay_open(trace, 0, policies, options)))
              .empty());
  }
  for (size_t i = 0; i < policies.size(); ++i) {
    reports::report alone, same;
    alone.runs.push_back(replay_open(trace, 0, {&policies[i], 1}, {})[0].row);
    same.runs.push_back(reference.runs[i]);
    CHECK(reports::differences(alone, same).empty());
  }
}

TEST_CASE("recall without the bound is the same recall") {
  temporary_folder folder;
  for (const auto kind : kinds) {
    const auto path = folder / "t.h5";
    traces::synth(path, options_for(kind, 8));
    const traces::reader trace(path);
    const auto policies = parse_all(all_specs());
    open_loop_options cheap;
    cheap.bound = false;
    const auto with = replay_open(trace, 0, policies, {});
    const auto without = replay_open(trace, 0, policies, cheap);
    for (size_t i = 0; i < policies.size(); ++i) {
      CAPTURE(policies[i].spec);
      CHECK(*without[i].row.quality.attention_recall ==
            doctest::Approx(*with[i].row.quality.attention_recall).epsilon(1e-5));
      CHECK_FALSE(without[i].row.quality.recall_bound.has_value());
      CHECK(*without[i].row.quality.output_rel_l2 == *with[i].row.quality.output_rel_l2);
    }
  }
}

TEST_CASE("a larger budget never lowers recall where ranks do not depend on it") {
  temporary_folder folder;
  const auto path = folder / "t.h5";
  traces::synth(path, options_for(trace_kind::grouped, 2));
  const traces::reader trace(path);
  for (const std::string name : {"window", "streaming", "random"}) {
    double last = 0;
    for (const int budget : {5, 6, 10, 30, 60, 95}) {
      const auto policy = policies::parse_policy(name + ":budget=" + std::to_string(budget));
      const double recall =
          *replay_open(trace, 0, {&policy, 1}, {})[0].row.quality.attention_recall;
      CHECK(recall >= last - 1e-9);
      last = recall;
    }
  }
}

TEST_CASE("steps that are scored are the decode steps less the skipped ones") {
  temporary_folder folder;
  const auto path = folder / "t.h5";
  traces::synth(path, options_for(trace_kind::grouped, 2));
  const traces::reader trace(path);
  const auto policy = policies::parse_policy("h2o:budget=12");
  open_loop_options whole;
  whole.per_step = true;
  const auto reference = replay_open(trace, 0, {&policy, 1}, whole)[0];
  for (const std::int64_t skip : {0, 1, 2, 3, 50, 51}) {
    open_loop_options options;
    options.skip = skip;
    const auto row = replay_open(trace, 0, {&policy, 1}, options)[0].row;
    CHECK(row.tokens.scored == 56 - skip);
    double sum = 0;
    for (size_t t = static_cast<size_t>(skip); t < 56; ++t) {
      sum += *reference.steps[t].attention_recall;
    }
    CHECK(*row.quality.attention_recall ==
          doctest::Approx(sum / static_cast<double>(56 - skip)).epsilon(1e-12));
  }
}

TEST_CASE("rows after t change no decision up to t") {
  temporary_folder folder;
  const auto path = folder / "t.h5";
  traces::synth(path, options_for(trace_kind::grouped, 21));
  const traces::reader trace(path);
  const std::int64_t from = 70;
  const auto changed_path = folder / "changed.h5";
  copy_trace(trace, changed_path, {.changed_from = from});
  const traces::reader changed(changed_path);
  auto policies = parse_all(all_specs());
  std::erase_if(policies, [](const auto& p) { return p.needs.future; });
  open_loop_options options;
  options.kept = true;
  const auto before = replay_open(trace, 0, policies, options);
  const auto after = replay_open(changed, 0, policies, options);
  bool anything_changed = false;
  for (size_t i = 0; i < policies.size(); ++i) {
    CAPTURE(policies[i].spec);
    REQUIRE_MESSAGE(after[i].row.status == "ok", after[i].row.note);
    const auto a = kept_sets(trace, before[i]), b = kept_sets(changed, after[i]);
    for (const auto& [key, positions] : a) {
      if (std::get<0>(key) < from) {
        CHECK(b.at(key) == positions);
      } else {
        anything_changed = anything_changed || b.at(key) != positions;
      }
    }
  }
  CHECK(anything_changed);
}

TEST_CASE("what a trace lacks is refused by name, by those who need it") {
  temporary_folder folder;
  const auto path = folder / "t.h5";
  traces::synth(path, options_for(trace_kind::grouped, 21));
  const traces::reader trace(path);
  const auto bare_path = folder / "bare.h5";
  copy_trace(trace, bare_path, {.confidence = false});
  const traces::reader bare(bare_path);
  const auto lanes =
      replay_open(bare, 0,
                  parse_all({"full", "h2o:budget=12", "confkv:high=8,low=20,recent=4",
                             "confkv:high=8,low=20,recent=4,gate=random"}),
                  {});
  CHECK(lanes[0].row.status == "ok");
  CHECK(lanes[1].row.status == "ok");
  CHECK(lanes[2].row.status == "failed");
  CHECK(lanes[2].row.note.find("confidence") != std::string::npos);
  CHECK(lanes[2].row.note.find("--logits stats") != std::string::npos);
  CHECK(lanes[3].row.status == "ok");
  // o and lse are recomputed where they are missing.
  CHECK(*lanes[0].row.quality.output_rel_l2 < 1e-3);
  CHECK(*lanes[0].row.quality.attention_recall == doctest::Approx(1).epsilon(1e-5));
}

TEST_CASE("a trace without the prompt's queries serves those who do not read them") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::grouped, 21));
  const traces::reader trace(folder / "t.h5");
  // From the prompt's last position on, as a recording of decode rows has them.
  copy_trace(trace, folder / "decode.h5", {.first_row = 39});
  const traces::reader decode(folder / "decode.h5");
  const auto policies =
      parse_all({"full", "window:budget=12", "streaming:budget=12", "random:budget=12",
                 "tova:budget=12", "confkv:high=8,low=20,recent=4,obs=1", "h2o:budget=12",
                 "confkv:high=8,low=20,recent=4", "confkv:high=8,low=20,recent=4,obs=2"});
  open_loop_options options;
  options.kept = true;
  const auto whole = replay_open(trace, 0, policies, options);
  const auto cut = replay_open(decode, 0, policies, options);
  for (size_t i = 0; i < policies.size(); ++i) {
    CAPTURE(policies[i].spec);
    if (i < 6) {
      REQUIRE_MESSAGE(cut[i].row.status == "ok", cut[i].row.note);
      CHECK(kept_sets(decode, cut[i]) == kept_sets(trace, whole[i]));
    } else {
      CHECK(cut[i].row.status == "failed");
      CHECK(cut[i].row.note.find("--rows all") != std::string::npos);
    }
  }
}

}  // namespace
}  // namespace kvreplay::replay
