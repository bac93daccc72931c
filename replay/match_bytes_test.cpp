#include "replay/match_bytes.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "replay/test_support.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

double single(const std::string& spec, double factor) {
  return scale_budgets(policies::parse_policy(spec), factor).budget.single.value;
}

TEST_CASE("one factor scales every budget, down to what is protected") {
  CHECK(single("window:budget=100", 0.505) == 51);  // 50.5 + .5
  CHECK(single("window:budget=100", 0.5049) == 50);
  CHECK(single("window:budget=100", 1e-9) == 1);
  CHECK(single("streaming:budget=100", 0.01) == 4);
  CHECK(single("random:budget=100,recent=8,sinks=2", 0.01) == 10);
  CHECK(single("h2o:budget=100", 0.01) == 1);  // its recent follows the budget
  CHECK(single("h2o:budget=30%", 0.5) == 15);
  CHECK(single("window:budget=7680B", 0.5) == 3840);
  const auto total = policies::parse_policy("h2o+global:total=900");
  CHECK(scale_budgets(total, 0.5).budget.division.total == 450);
  const auto gated = scale_budgets(policies::parse_policy("confkv"), 0.5);
  CHECK(gated.budget.gate.high.value == 128);
  CHECK(gated.budget.gate.low.value == 384);
  CHECK(scale_budgets(policies::parse_policy("confkv"), 0.1).budget.gate.high.value == 64);
}

TEST_CASE("a scaled policy can be pasted back, and 1 changes nothing") {
  for (const char* spec : {"h2o:budget=100+int8:window=16", "confkv-l:tau=0.4,shrink=2",
                           "tova:budget=25%+every:n=4", "window:budget=1MiB"}) {
    const auto policy = policies::parse_policy(spec);
    CHECK(scale_budgets(policy, 1).resolved == policy.resolved);
    const auto scaled = scale_budgets(policy, 0.37);
    CHECK(scaled.resolved != policy.resolved);
    CHECK(policies::parse_policy(scaled.resolved).resolved == scaled.resolved);
  }
}

TEST_CASE("mean bytes meet the target or the setting below it is taken and the rest is said") {
  temporary_folder folder;
  for (const auto kind : {trace_kind::grouped, trace_kind::windowed}) {
    auto options = options_for(kind, 6);
    options.tokens = 300;
    options.prompt_length = 120;
    traces::synth(folder / "t.h5", options);
    const traces::reader trace(folder / "t.h5");
    std::vector<policies::policy> policies;
    for (const char* spec :
         {"window:budget=10", "h2o:budget=200", "confkv:high=20,low=60,recent=4,shrink=2,tau=q0.5",
          "confkv-l:high=20,low=60,recent=2", "h2o:budget=20+int8:window=8", "tova:budget=10%",
          "streaming:budget=9000B", "full"}) {
      policies.push_back(policies::parse_policy(spec));
    }
    const double target = 3 * 2 * 32 * 41.0;
    const auto matched = match_bytes(trace, 0, policies, target, {});
    for (size_t i = 0; i < policies.size(); ++i) {
      CAPTURE(policies[i].spec);
      CAPTURE(matched[i].policy.resolved);
      if (policies[i].name == "full") {
        CHECK_FALSE(matched[i].factor.has_value());
        continue;
      }
      REQUIRE(matched[i].factor.has_value());
      const auto row = replay_open(trace, 0, {&matched[i].policy, 1}, {})[0].row;
      const double difference = *row.memory.mean_bytes / target - 1;
      if (std::fabs(difference) > 0.005) {
        CHECK(difference < 0);
        REQUIRE(matched[i].difference.has_value());
        CHECK(*matched[i].difference == doctest::Approx(difference));
        CHECK_FALSE(matched[i].note.empty());
        // The next setting up is beyond the target.
        const auto next = scale_budgets(policies[i], *matched[i].factor * 1.06);
        CHECK(*replay_open(trace, 0, {&next, 1}, {})[0].row.memory.mean_bytes > target);
      }
    }
  }
}

TEST_CASE("a target that nothing reaches ends the search") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::grouped, 6));
  const traces::reader trace(folder / "t.h5");
  const auto policy = policies::parse_policy("h2o:budget=10");
  for (const double target : {1.0, 1e12}) {
    const auto matched = match_bytes(trace, 0, {&policy, 1}, target, {});
    CHECK(matched[0].note.find("no budget comes nearer") != std::string::npos);
    CHECK(matched[0].difference.has_value());
  }
}

}  // namespace
}  // namespace kvreplay::replay
