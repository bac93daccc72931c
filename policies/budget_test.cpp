#include "policies/budget.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace kvreplay::policies {
namespace {

// 4 layers x 3 KV heads, 16 + 16 channels: 64 bytes an entry in FP16, 32 codes in INT8.
model_dims small_model() { return {4, 3, 16, 16, {}, {}}; }

budget_plan plan_of(std::string_view spec, const model_dims& dims = small_model()) {
  return {parse_policy(spec), dims};
}

// The uniform budget of an ungated policy.
int entries_of(std::string_view spec, const model_dims& dims = small_model()) {
  return plan_of(spec, dims).budget(100, 0, 0, 50, false);
}

TEST_CASE("full has no budget") {
  const budget_plan plan = plan_of("full");
  CHECK(plan.budget(0, 3, 2, 5, false) == INT_MAX);
  CHECK(plan.share(1000, 0, true) == INT_MAX);
}

TEST_CASE("entries are what they say, in every layer and head, at every step") {
  const budget_plan plan = plan_of("window:budget=1");
  CHECK(plan.budget(0, 0, 0, 1, false) == 1);
  CHECK(plan.budget(1000000, 3, 2, 9, true) == 1);
  CHECK(entries_of("window:budget=2147483647") == INT_MAX);
}

TEST_CASE("a share counts the positions seen, rounds half up and keeps at least one") {
  const budget_plan fifth = plan_of("h2o:budget=20%");
  // t + 1:   1  2  3  7  8   12  13  96   144
  // 20 %:   .2 .4 .6 1.4 1.6 2.4 2.6 19.2 28.8
  const std::vector<std::pair<int, int>> expected{{0, 1},  {1, 1},  {2, 1},   {6, 1},   {7, 2},
                                                  {11, 2}, {12, 3}, {95, 19}, {143, 29}};
  for (const auto& [step, entries] : expected) {
    CAPTURE(step);
    CHECK(fifth.budget(step, 1, 1, 200, false) == entries);
  }
  const budget_plan half = plan_of("h2o:budget=50%");
  CHECK(half.budget(0, 0, 0, 1, false) == 1);  // .5 rounds up
  CHECK(half.budget(2, 0, 0, 3, false) == 2);  // 1.5 rounds up
  CHECK(plan_of("h2o:budget=100%").budget(41, 0, 0, 42, false) == 42);
  CHECK(plan_of("h2o:budget=0.0001%").budget(100, 0, 0, 9, false) == 1);
  CHECK(plan_of("h2o:budget=100%").budget(std::int64_t{1} << 40, 0, 0, 9, false) == INT_MAX);
}

TEST_CASE("short contexts and small ratios keep at least one entry") {
  for (const auto& [length, spec] :
       std::vector<std::pair<int, std::string>>{{10, "window:budget=4%"},
                                                {2, "window:budget=40%"},
                                                {1, "window:budget=1%"},
                                                {8, "window:budget=0.001%"}}) {
    CHECK(plan_of(spec).budget(length - 1, 0, 0, length, false) == 1);
  }
}

TEST_CASE("bytes in FP16: the largest B that fits") {
  // 12 heads x 64 bytes = 768 bytes for one entry everywhere.
  CHECK(entries_of("window:budget=768B") == 1);
  CHECK(entries_of("window:budget=1535B") == 1);
  CHECK(entries_of("window:budget=1536B") == 2);
  CHECK(entries_of("window:budget=64MiB") == 87381);  // 67108864 / 768 = 87381.3
  CHECK_THROWS_WITH_AS(plan_of("window:budget=767B"),
                       "budget=767B: less than one entry in every (layer, KV head), which takes "
                       "768 bytes",
                       spec_error);
  // Value rows of another width: 3 x 4 x (16 + 8) x 2 = 576.
  CHECK(entries_of("window:budget=5760B", {4, 3, 16, 8, {}, {}}) == 10);
}

TEST_CASE("bytes count the recorded layers, and a windowed layer at most its window") {
  // Two recorded layers: 384 bytes an entry everywhere.
  CHECK(entries_of("window:budget=3840B", {4, 3, 16, 16, {}, {1, 3}}) == 10);
  // Windows {8, 0, 8, 0}: up to 8 entries 768 each, then 384.
  const model_dims windowed{4, 3, 16, 16, {8, 0, 8, 0}, {}};
  CHECK(entries_of("window:budget=6143B", windowed) == 7);
  CHECK(entries_of("window:budget=6144B", windowed) == 8);
  CHECK(entries_of("window:budget=6527B", windowed) == 8);
  CHECK(entries_of("window:budget=6528B", windowed) == 9);
  CHECK(entries_of("window:budget=1MB", {4, 3, 16, 16, {8, 8, 8, 8}, {}}) == INT_MAX);
  CHECK(entries_of("window:budget=6144B", {4, 3, 16, 16, {8, 0, 8, 0}, {0, 2}}) == INT_MAX);
}

TEST_CASE("bytes in INT8: newest W in FP16, scalars, channel tables") {
  // hybrid, per head: 128 of tables, 64 for each of the newest 16, 32 + 4 for every other.
  // B = 48: 128 + 1024 + 32 * 36 = 2304, x 12 = 27648.
  CHECK(entries_of("h2o:budget=27648B+int8:window=16") == 48);
  CHECK(entries_of("h2o:budget=27647B+int8:window=16") == 47);
  // Below the window there is FP16 alone, and the tables from the first step: 12 * (128 + 64 B).
  CHECK(entries_of("h2o:budget=2304B+int8:window=16") == 1);
  CHECK(entries_of("h2o:budget=13824B+int8:window=16") == 16);
  CHECK(entries_of("h2o:budget=14255B+int8:window=16") == 16);
  CHECK(entries_of("h2o:budget=14256B+int8:window=16") == 17);
  CHECK_THROWS_AS(plan_of("h2o:budget=2303B+int8:window=16"), spec_error);
  // token: no tables. 12 * (1024 + 32 * 36) = 26112.
  CHECK(entries_of("h2o:budget=26112B+int8:window=16,scales=token") == 48);
  CHECK(entries_of("h2o:budget=26111B+int8:window=16,scales=token") == 47);
  // channel: tables, no scalars. 12 * (128 + 1024 + 32 * 32) = 26112.
  CHECK(entries_of("h2o:budget=26112B+int8:window=16,scales=channel") == 48);
  CHECK(entries_of("h2o:budget=26111B+int8:window=16,scales=channel") == 47);
  CHECK(entries_of("h2o:budget=26112B+int8:window=16,scales=channel,update=static") == 48);
  // group, int4: every entry as the last of its group. 12 * 10 * (32 + 2 * 32); KIVI's:
  // 12 * 10 * (8 + 8 + 4 + 4 * 16).
  CHECK(entries_of("h2o:budget=11520B+int8:window=16,scales=group") == 10);
  CHECK(entries_of("h2o:budget=11519B+int8:window=16,scales=group") == 9);
  CHECK(entries_of("h2o:budget=10080B+int4:window=16") == 10);
  CHECK(entries_of("h2o:budget=10079B+int4:window=16") == 9);
  // Sinks in FP16 take more: 12 * (128 + 20 * 64 + 28 * 36) = 28992.
  CHECK(entries_of("h2o:budget=28992B+int8:window=16,sinks=4") == 48);
  CHECK(entries_of("h2o:budget=28991B+int8:window=16,sinks=4") == 47);
  CHECK(entries_of("h2o:budget=9007199254740992B+int8:window=2147483647,sinks=2147483647") ==
        INT_MAX);
}

TEST_CASE("h2o protects what its share of the budget leaves") {
  const auto recent = [](std::string_view spec, int budget) {
    return plan_of(spec).protect(budget).recent;
  };
  CHECK(recent("h2o:budget=48", 48) == 24);
  CHECK(recent("h2o:budget=7", 7) == 4);  // 7 - floor(3.5)
  CHECK(recent("h2o:budget=1", 1) == 1);
  CHECK(recent("h2o:budget=10,heavy=0", 10) == 10);
  CHECK(recent("h2o:budget=10,heavy=1", 10) == 0);
  CHECK(recent("h2o:budget=10+protect:recent=3", 10) == 3);
  // The step's own budget counts: 20 % of 30 positions is 6.
  const budget_plan growing = plan_of("h2o:budget=20%");
  CHECK(growing.protect(growing.budget(29, 0, 0, 30, false)).recent == 3);
  CHECK(plan_of("streaming:budget=9").protect(9).sinks == 4);
  CHECK(plan_of("tova:budget=9").protect(9).recent == 0);
}

TEST_CASE("selection runs after P-1, then every n-th step, or never again") {
  const budget_plan each = plan_of("h2o:budget=9");
  CHECK(!each.selects(8, 10));
  CHECK(each.selects(9, 10));
  CHECK(each.selects(10, 10));
  const budget_plan fourth = plan_of("h2o:budget=9+every:n=4");
  std::vector<int> steps;
  for (int t = 0; t < 20; ++t) {
    if (fourth.selects(t, 10)) steps.push_back(t);
  }
  CHECK(steps == std::vector<int>{9, 13, 17});
  const budget_plan once = plan_of("h2o:budget=9+prefill");
  CHECK(once.selects(9, 10));
  CHECK(!once.selects(10, 10));
  CHECK(!once.selects(8, 10));
}

// held entries of one head: select after P-1 with held = P, then one newcomer a step.
std::vector<int> held_over(const budget_plan& plan, int n_prompt, std::string_view tight,
                           int layer = 0) {
  std::vector<int> out;
  int held = n_prompt;
  for (size_t i = 0; i < tight.size(); ++i) {
    if (i > 0) ++held;
    const auto step = static_cast<std::int64_t>(i) + n_prompt - 1;
    held = std::min(held, plan.budget(step, layer, 0, held, tight[i] == 'T'));
    out.push_back(held);
  }
  return out;
}

TEST_CASE("the gate read literally: shrinking is instant, growing one entry a step") {
  const budget_plan plan = plan_of("confkv:high=4,low=8,recent=2");
  CHECK(held_over(plan, 12, "LLTLLLLLLT") == std::vector<int>{8, 8, 4, 5, 6, 7, 8, 8, 8, 4});
  CHECK(held_over(plan, 12, "TL") == std::vector<int>{4, 5});
  CHECK(held_over(plan, 3, "TTTL") == std::vector<int>{3, 4, 4, 5});
}

// c(95 .. 191) >= 0.6 in the golden trace `plain` (4 layers, prompt 96), T for tight.
constexpr std::string_view plain_trace =
    "LLLLLLLLLLLLLLLLLTTTLTLTTTLTTTLTTTTLLLTTTTTLTTTTLTTLTLTTTLTTLTLT"
    "LLTLLTLLLLLLLLLLLLLLLLLLLLTTLLTTT";

// Entries per head while a step attends, mean over the decode steps and the layers.
double mean_entries(const budget_plan& plan, int layers, int n_prompt, std::string_view tight) {
  double sum = 0;
  for (int layer = 0; layer < layers; ++layer) {
    const std::vector<int> held = held_over(plan, n_prompt, tight, layer);
    for (size_t i = 0; i + 1 < held.size(); ++i) sum += held[i] + 1;
  }
  return sum / layers / static_cast<double>(tight.size() - 1);
}

TEST_CASE("mean entries of an independent implementation on a recorded gate") {
  // The figures of the float64 reference.
  CHECK(mean_entries(plan_of("confkv:tau=0.6,high=32,low=64,recent=16"), 4, 96, plain_trace) ==
        doctest::Approx(41.125).epsilon(1e-12));
  CHECK(mean_entries(plan_of("confkv-l:tau=0.6,high=32,low=64,recent=8"), 4, 96, plain_trace) ==
        doctest::Approx(41.098958333333336).epsilon(1e-12));
}

TEST_CASE("shrink=2: at most two leave a step, the prompt included once it is below low") {
  const budget_plan plan = plan_of("confkv:high=4,low=8,recent=2,shrink=2");
  // Each step brings one and lets two go: 8 -> 7 -> 6.
  CHECK(held_over(plan, 12, "TTTTTTL") == std::vector<int>{8, 7, 6, 5, 4, 4, 5});
  CHECK(held_over(plan, 12, "LLTL") == std::vector<int>{8, 8, 7, 8});
  CHECK(held_over(plan, 7, "TTL") == std::vector<int>{5, 4, 5});
  CHECK(held_over(plan, 5, "T") == std::vector<int>{4});
  CHECK(held_over(plan, 3, "LL") == std::vector<int>{3, 4});
}

TEST_CASE("shrink=1 never falls once it holds; shrink=0 grows to low") {
  CHECK(held_over(plan_of("confkv:high=4,low=8,recent=2,shrink=1"), 12, "TTTT") ==
        std::vector<int>{8, 8, 8, 8});
  CHECK(held_over(plan_of("confkv:high=4,low=8,recent=2,shrink=0"), 6, "TTTT") ==
        std::vector<int>{6, 7, 8, 8});
}

TEST_CASE("gate=constant is one budget at every step, shrink or not") {
  for (const char* shrink : {"all", "1"}) {
    const budget_plan plan =
        plan_of(std::string("confkv:high=4,low=9,recent=2,gate=constant,shrink=") + shrink);
    for (const bool tight : {false, true}) {
      CHECK(plan.budget(20, 0, 0, 21, tight) == 6);
      CHECK(plan.share(20, 0, tight) == 6);
    }
  }
  CHECK(plan_of("confkv:high=512,low=512").budget(5, 0, 0, 600, false) == 512);
  CHECK(plan_of("random+confidence:high=10%,low=30%,gate=constant").share(99, 0, true) == 20);
}

TEST_CASE("gated budgets in percent and bytes; confkv's window is hard") {
  const budget_plan mixed = plan_of("h2o+confidence:high=7680B,low=50%");
  CHECK(mixed.share(99, 0, true) == 10);
  CHECK(mixed.share(99, 0, false) == 50);
  CHECK_THROWS_WITH_AS(plan_of("confkv:high=7680B,recent=11"),
                       "confkv: high=7680B is 10 entries, fewer than recent=11, which is never "
                       "evicted",
                       spec_error);
  CHECK(plan_of("confkv:high=7680B,recent=10").share(0, 0, true) == 10);
}

TEST_CASE("dimensions that cannot be are refused") {
  CHECK_THROWS_AS(plan_of("full", {0, 3, 16, 16, {}, {}}), std::invalid_argument);
  CHECK_THROWS_AS(plan_of("full", {4, 3, 16, 16, {8}, {}}), std::invalid_argument);
  CHECK_THROWS_AS(plan_of("full", {4, 3, 16, 16, {}, {4}}), std::invalid_argument);
  CHECK_THROWS_AS(plan_of("full", {4, 3, 16, 16, {}, {-1}}), std::invalid_argument);
}

}  // namespace
}  // namespace kvreplay::policies
