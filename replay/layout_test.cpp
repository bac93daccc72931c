// The layout of the cache changes where bytes lie and no result.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <string>
#include <vector>

#include "policies/policy.hpp"
#include "replay/open_loop.hpp"
#include "replay/test_support.hpp"
#include "reports/result.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

// Compared with a page of 4: every number but the reserved bytes and the times.
void check_layouts(const traces::reader& trace, const std::string& spec) {
  CAPTURE(spec);
  const std::vector<policies::policy> both = {policies::parse_policy(spec),
                                              policies::parse_policy(spec + "+paged:page=4")};
  open_loop_options options;
  options.kept = true;
  auto lanes = replay_open(trace, 0, both, options);
  REQUIRE_MESSAGE(lanes[1].row.status == "ok", lanes[1].row.note);
  const double paged = *lanes[1].row.memory.reserved_bytes;
  CHECK(paged >= *lanes[1].row.memory.final_bytes);
  reports::result& other = lanes[1].row;
  CHECK(other.policy != lanes[0].row.policy);
  other.policy = lanes[0].row.policy;
  other.params = lanes[0].row.params;
  other.memory.reserved_bytes = lanes[0].row.memory.reserved_bytes;
  CHECK(reports::differences({{}, {lanes[0].row}}, {{}, {other}}) == std::vector<std::string>{});
  REQUIRE(lanes[0].dropped.size() == lanes[1].dropped.size());
  for (size_t h = 0; h < lanes[0].dropped.size(); ++h) {
    REQUIRE(lanes[0].dropped[h].size() == lanes[1].dropped[h].size());
    for (size_t i = 0; i < lanes[0].dropped[h].size(); ++i) {
      CHECK(lanes[0].dropped[h][i].step == lanes[1].dropped[h][i].step);
      CHECK(lanes[0].dropped[h][i].positions == lanes[1].dropped[h][i].positions);
    }
  }
}

TEST_CASE("pages change no result of any policy") {
  temporary_folder folder;
  for (const auto kind : {trace_kind::windowed, trace_kind::sinks, trace_kind::one_token_prompt}) {
    const auto path = folder / "t.h5";
    traces::synth(path, options_for(kind, 3));
    const traces::reader trace(path);
    for (const char* spec :
         {"full", "full+int8:window=8,scales=channel", "full+int8:window=2,scales=group",
          "h2o:budget=60+int4:window=3", "h2o:budget=12", "window:budget=14+int8:window=6",
          "confkv:high=8,low=20,recent=4+int8:window=6",
          "tova:budget=12+every:n=5+int8:window=3,scales=token"}) {
      check_layouts(trace, spec);
    }
  }
}

TEST_CASE("what is stored never exceeds a budget in bytes, in any format") {
  temporary_folder folder;
  auto options = options_for(trace_kind::one_layer, 8);
  options.prompt_length = 150;
  options.tokens = 280;
  const auto path = folder / "t.h5";
  traces::synth(path, options);
  const traces::reader trace(path);
  for (const char* precision :
       {"fp16", "int8:window=4", "int8:window=4,scales=token", "int8:window=4,scales=channel",
        "int8:window=4,scales=group", "int4:window=4", "int4:window=4,sinks=3"}) {
    CAPTURE(precision);
    // Random eviction thins groups out: few members for all the scales.
    const auto policy = policies::parse_policy(fmt::format("random:budget=10000B+{}", precision));
    open_loop_options replay;
    replay.per_step = true;
    const auto lane = replay_open(trace, 0, {&policy, 1}, replay).front();
    REQUIRE_MESSAGE(lane.row.status == "ok", lane.row.note);
    CHECK(*lane.row.memory.final_bytes <= 10000);
    const double entry = 2 * 2 * 8 * 2;  // the newcomer, FP16
    for (const auto& step : lane.steps) CHECK(*step.bytes <= 10000 + entry);
    if (policy.precision.body != policies::body_kind::none) CHECK(*lane.row.events.quantised > 0);
  }
}

}  // namespace
}  // namespace kvreplay::replay
