// Small traces made by hand, with the kept sets worked out in the comments.
#include <doctest/doctest.h>

#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/half.hpp"
#include "policies/policy.hpp"
#include "replay/one_hot_trace.hpp"
#include "replay/open_loop.hpp"
#include "replay/test_support.hpp"
#include "traces/reader.hpp"
#include "traces/writer.hpp"

namespace kvreplay::replay {
namespace {

using positions = std::vector<std::int32_t>;

std::map<std::tuple<std::int64_t, int, int>, positions> kept_sets(const traces::reader& trace,
                                                                  const lane_output& lane) {
  std::map<std::tuple<std::int64_t, int, int>, positions> sets;
  for_each_kept_set(trace, 0, lane, [&](std::int64_t step, int layer, int head, const auto& p) {
    sets[{step, layer, head}] = p;
  });
  return sets;
}

std::vector<lane_output> replay_specs(const traces::reader& trace,
                                      const std::vector<std::string>& specs) {
  std::vector<policies::policy> policies;
  for (const auto& spec : specs) policies.push_back(policies::parse_policy(spec));
  open_loop_options options;
  options.kept = true;
  auto lanes = replay_open(trace, 0, policies, options);
  for (const auto& lane : lanes) REQUIRE_MESSAGE(lane.row.status == "ok", lane.row.note);
  return lanes;
}

// Seven query heads on one KV head. In the last prompt row one head gives nearly all of its mass to
// position 1, the other six split theirs over many positions but favour position 2: by the mean
// (and the sum) position 2 wins, by the maximum position 1.
TEST_CASE("seven query heads vote on one kept set") {
  temporary_folder folder;
  one_hot_trace trace(7, 5, 6);
  trace.look(4, 0, 1, 20);
  for (int head = 1; head < 7; ++head) trace.look(4, head, 2, 1.5F);
  trace.write(folder / "t.h5");
  const traces::reader reader(folder / "t.h5");
  const auto confkv = [](const std::string& gqa) {
    return "confkv:high=1,low=1,recent=0,recency=0,obs=1,gate=constant,gqa=" + gqa;
  };
  const auto lanes = replay_specs(reader, {confkv("mean"), confkv("sum"), confkv("max")});
  CHECK(kept_sets(reader, lanes[0]).at({4, 0, 0}) == positions{2});
  CHECK(kept_sets(reader, lanes[1]).at({4, 0, 0}) == positions{2});
  CHECK(kept_sets(reader, lanes[2]).at({4, 0, 0}) == positions{1});
}

// Rows 1 .. 4 look at position 1, the last prompt row at position 3: all queries and the last one
// choose differently. Rows 0 .. 4 would give all their weight to position 5 if they could see it:
// what lies above the diagonal has no effect.
TEST_CASE("h2o counts all queries of the prompt, tova the last one") {
  temporary_folder folder;
  one_hot_trace trace(1, 6, 7);
  for (int t = 0; t < 5; ++t) {
    trace.look(t, 0, 1, 6);
    trace.look(t, 0, 5, 12);
  }
  trace.look(5, 0, 3, 6);
  trace.look(6, 0, 0, 6);
  trace.write(folder / "t.h5");
  const traces::reader reader(folder / "t.h5");
  const auto lanes =
      replay_specs(reader, {"h2o:budget=1,heavy=1", "tova:budget=1", "window:budget=1"});
  CHECK(kept_sets(reader, lanes[0]).at({5, 0, 0}) == positions{1});
  CHECK(kept_sets(reader, lanes[1]).at({5, 0, 0}) == positions{3});
  CHECK(kept_sets(reader, lanes[2]).at({5, 0, 0}) == positions{5});
}

TEST_CASE("a window keeps the newest B after a step and attends to B + 1") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::grouped, 4));
  const traces::reader trace(folder / "t.h5");
  const auto lanes = replay_specs(trace, {"window:budget=8", "streaming:budget=8,sinks=3"});
  for (std::int64_t step = 39; step < 96; ++step) {
    positions newest, with_sinks{0, 1, 2};
    for (std::int64_t t = step - 7; t <= step; ++t) newest.push_back(static_cast<std::int32_t>(t));
    for (std::int64_t t = step - 4; t <= step; ++t)
      with_sinks.push_back(static_cast<std::int32_t>(t));
    CHECK(kept_sets(trace, lanes[0]).at({step, 1, 1}) == newest);
    CHECK(kept_sets(trace, lanes[1]).at({step, 1, 1}) == with_sinks);
  }
  CHECK(*lanes[0].row.memory.mean_entries == 9);
}

// Windows {8, none, 8, none} and 20 positions: after the last, the model itself holds 8 + 20 + 8 +
// 20 rows, not 80. A budget of 12 saves nothing in the windowed layers.
TEST_CASE("what the model never kept is not saved") {
  temporary_folder folder;
  auto options = options_for(trace_kind::grouped, 4);
  options.layers = 4;
  options.window = {8, 0, 8, 0};
  options.prompt_length = 10;
  options.tokens = 20;
  traces::synth(folder / "t.h5", options);
  const traces::reader trace(folder / "t.h5");
  const auto lanes = replay_specs(trace, {"full", "h2o:budget=12"});
  const double head_bytes = 2 * 8 * 2;  // K and V of 8 channels in FP16
  CHECK(*lanes[0].row.memory.full_peak_bytes == 2 * head_bytes * (8 + 20 + 8 + 20));
  CHECK(*lanes[0].row.memory.peak_bytes == 2 * head_bytes * (8 + 20 + 8 + 20));
  CHECK(*lanes[1].row.memory.peak_bytes == 2 * head_bytes * (8 + 13 + 8 + 13));
}

TEST_CASE("more protected than the budget: sinks first, then the newest, and said") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::grouped, 4));
  const traces::reader trace(folder / "t.h5");
  const auto lanes =
      replay_specs(trace, {"streaming:budget=3,sinks=4", "tova:budget=4,protect_last=32",
                           "random:budget=5,sinks=2,recent=9"});
  CHECK(kept_sets(trace, lanes[0]).at({60, 0, 0}) == positions{0, 1, 2});
  CHECK(kept_sets(trace, lanes[1]).at({60, 0, 0}) == positions{57, 58, 59, 60});
  CHECK(kept_sets(trace, lanes[2]).at({60, 0, 0}) == positions{0, 1, 58, 59, 60});
  for (const auto& lane : lanes) {
    CHECK(lane.row.note.find("degenerate") != std::string::npos);
  }
}

// c is read off the trace; the gate at tau > 1 never tightens, at tau <= 0.15 always does.
TEST_CASE("the gate decides what the next step finds") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::grouped, 4));
  const traces::reader trace(folder / "t.h5");
  const auto lanes = replay_specs(
      trace, {"confkv:tau=0.15,high=10,low=20,recent=4", "confkv:tau=1.5,high=10,low=20,recent=4",
              "confkv:tau=q0.5,high=10,low=20,recent=4",
              "confkv:tau=q0.5,high=10,low=20,recent=4,shrink=2"});
  CHECK(*lanes[0].row.memory.mean_entries == 11);
  CHECK(*lanes[0].row.confidence.low_share == 0);
  CHECK(*lanes[0].row.confidence.loose_share == 0);
  CHECK(*lanes[1].row.memory.mean_entries == 21);
  CHECK(*lanes[1].row.confidence.loose_share == 1);
  // Read literally, shrinking is instant and growing is one entry a step.
  CHECK(*lanes[2].row.memory.mean_entries > 11);
  CHECK(*lanes[2].row.memory.mean_entries < *lanes[3].row.memory.mean_entries);
  CHECK(lanes[2].row.note.find("future") != std::string::npos);
}

// P = 3, two more tokens, one head. Scores are 0 but where said. In step 3 the row sees 0..3.
// window:budget=2 holds {1, 2} after the prompt and attends over {1, 2, 3} in step 3, {2, 3, 4}
// in 4. Step 3: equal scores, A = 1/4 each: recall 3/4, bound 3/4. Step 4: position 0 has score ln
// 6, so A = (6, 1, 1, 1, 1) / 10: recall 3/10, bound (6 + 1 + 1) / 10.
TEST_CASE("recall and its bound, by hand") {
  temporary_folder folder;
  one_hot_trace made(1, 3, 5);
  made.look(4, 0, 0, std::log(6.0F) * 1.0F);
  made.write(folder / "t.h5");
  const traces::reader trace(folder / "t.h5");
  const auto lanes = replay_specs(trace, {"window:budget=2"});
  CHECK(*lanes[0].row.quality.attention_recall == doctest::Approx((0.75 + 0.3) / 2).epsilon(1e-3));
  CHECK(*lanes[0].row.quality.recall_bound == doctest::Approx((0.75 + 0.8) / 2).epsilon(1e-3));
  // Step 3: o^ = 1/3 on three positions, o = 1/4 on four: ||o^ - o|| / ||o|| = sqrt(1/12) / (1/2).
  // Step 4: o^ = 1/3 on positions 2, 3, 4; o = A.
  const double first = std::sqrt(1.0 / 12) / 0.5;
  const double error = 3 * std::pow(1.0 / 3 - 0.1, 2) + 0.36 + 0.01, reference = 0.36 + 4 * 0.01;
  CHECK(*lanes[0].row.quality.output_rel_l2 ==
        doctest::Approx((first + std::sqrt(error / reference)) / 2).epsilon(2e-3));
  CHECK(*lanes[0].row.events.evicted == 2);
  CHECK(*lanes[0].row.events.kept_turnover == 1);
}

// The same attention, position 0 named as the needle. streaming:budget=2,sinks=1 attends over
// {0, 2, 3} in step 3 (A: .25, .25, .25) and over {0, 3, 4} in step 4 (.6, .1, .1).
TEST_CASE("evidence: how much of a span's mass is held, and how sharply it is seen") {
  temporary_folder folder;
  one_hot_trace made(1, 3, 5);
  made.look(4, 0, 0, std::log(6.0F));
  made.span("needle", 0, 1);
  made.span("answer", 3, 5);
  made.write(folder / "t.h5");
  const traces::reader trace(folder / "t.h5");
  const auto lanes = replay_specs(trace, {"streaming:budget=2,sinks=1", "window:budget=2"});
  const auto& kept = lanes[0].row.quality;
  CHECK(*kept.evidence_mass == doctest::Approx((0.25 + 0.6) / 2).epsilon(1e-3));
  CHECK(*kept.evidence_kept == doctest::Approx(1).epsilon(1e-6));
  CHECK(*kept.evidence_gain == doctest::Approx(1 / ((0.75 + 0.8) / 2)).epsilon(1e-3));
  REQUIRE(kept.more.size() == 2);
  CHECK(kept.more[1].name == "kept_share.needle");
  CHECK(*kept.more[1].value == 1);
  CHECK(kept.more[0].name == "kept_share.answer");
  CHECK(*kept.more[0].value == 1);  // {3} of {3}, then {3, 4} of {3, 4}
  CHECK(*lanes[1].row.quality.evidence_kept == 0);
  CHECK(*lanes[1].row.quality.more[1].value == 0);
  CHECK(lanes[0].row.note.find("needle") != std::string::npos);
}

}  // namespace
}  // namespace kvreplay::replay
