#include "policies/division.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "policies/budget.hpp"

namespace kvreplay::policies {
namespace {

using heads = std::vector<std::vector<candidate>>;

heads with_scores(const std::vector<std::vector<float>>& scores) {
  heads out;
  for (const auto& head : scores) {
    out.emplace_back();
    for (const float s : head) {
      out.back().push_back({s, static_cast<std::int32_t>(out.back().size())});
    }
  }
  return out;
}

division_rule rule_of(double floor, bool blend = false) {
  division_rule rule;
  rule.kind = division_kind::adaptive;
  rule.floor = floor;
  rule.blend = blend;
  return rule;
}

// The best six of all are two of the first head and four of the second.
TEST_CASE("AdaKV's own example: counts (2, 4), floor 0.5, F 3") {
  const auto all = with_scores({{9, 8, 1, 1, 1}, {7, 6, 5, 4, 0}});
  const std::vector<int> free{3, 3};
  CHECK(adaptive_counts(rule_of(0.5, true), all, free) == std::vector<int>{2, 3});
  CHECK(adaptive_counts(rule_of(0.5), all, free) == std::vector<int>{2, 4});
}

TEST_CASE("blend rounds half to even and its total is not exact") {
  const auto all = with_scores({{9, 1, 1, 1, 1}, {8, 7, 6, 5, 1}, {4, 3, 1, 1, 1}});
  const std::vector<int> free{3, 3, 3};  // best nine: 9 8 7 6 5 4 3 and two of the ones
  // counts 2 (the newest 1), 5, 2: rint(count / 2 + 1) = 2, 4 (3.5), 2.
  CHECK(divide(all, std::vector<int>{0, 0, 0}, 9) == std::vector<int>{2, 5, 2});
  CHECK(adaptive_counts(rule_of(0.5, true), all, free) == std::vector<int>{2, 4, 2});
}

// One head with nearly everything on one entry, three that spread theirs evenly.
TEST_CASE("a head that needs few entries gives the others room; the sum is exact") {
  std::vector<std::vector<float>> scores(4, std::vector<float>(200, 0.005F));
  scores[0].assign(200, 0.0005F);
  scores[0][17] = 0.9F;
  const auto all = with_scores(scores);
  for (const int b : {1, 2, 3, 7, 100}) {
    CAPTURE(b);
    const std::vector<int> free(4, b);
    const auto counts = adaptive_counts(rule_of(0.2), all, free);
    CHECK(std::accumulate(counts.begin(), counts.end(), 0) == 4 * b);
    CHECK(counts[0] == *std::min_element(counts.begin(), counts.end()));
    CHECK(counts[0] >= 1);
    if (b > 1) CHECK(counts != free);
    CHECK(adaptive_counts(rule_of(1), all, free) == free);
    for (const int n : adaptive_counts(rule_of(0), all, free)) CHECK(n >= 1);
  }
}

TEST_CASE(
    "ties go to the newer position, then to the lower head; short heads leave what they lack") {
  const auto all = with_scores({{1, 1, 1}, {1, 1, 1}, {5}});
  CHECK(divide(all, std::vector<int>{0, 0, 0}, 2) == std::vector<int>{1, 0, 1});
  CHECK(divide(all, std::vector<int>{0, 0, 0}, 4) == std::vector<int>{2, 1, 1});
  CHECK(divide(all, std::vector<int>{1, 1, 1}, 4) == std::vector<int>{2, 1, 1});
  CHECK(divide(all, std::vector<int>{0, 2, 4}, 3) == std::vector<int>{0, 2, 1});
  CHECK(divide(all, std::vector<int>{0, 0, 0}, 99) == std::vector<int>{3, 3, 1});
  CHECK(divide(all, std::vector<int>{0, 0, 0}, 0) == std::vector<int>{0, 0, 0});
}

model_dims dims_of(int layers, int kv_heads) { return {layers, kv_heads, 16, 16, {}, {}}; }

TEST_CASE("pyramidkv with exact=0 is the published progression, window included") {
  const budget_plan plan(parse_policy("pyramidkv:budget=128,obs=8,exact=0"), dims_of(32, 8));
  std::int64_t sum = 0;
  for (int l = 0; l < 32; ++l) sum += plan.share(4095, l, false);
  CHECK(plan.share(4095, 0, false) == 242);
  CHECK(plan.share(4095, 1, false) == 235);
  CHECK(plan.share(4095, 31, false) == 25);
  CHECK(sum == 4272);
  const budget_plan exact(parse_policy("pyramidkv:budget=128,obs=8"), dims_of(32, 8));
  sum = 0;
  for (int l = 0; l < 32; ++l) {
    CHECK(exact.share(4095, l, false) >= 8);
    sum += exact.share(4095, l, false);
  }
  CHECK(sum == 32 * 128);
  // Nothing left beside the window.
  const budget_plan tight(parse_policy("pyramidkv:budget=8,obs=8"), dims_of(4, 1));
  for (int l = 0; l < 4; ++l) CHECK(tight.share(99, l, false) == 8);
}

// F = 32 - 8 = 24, floor(24 / 1.5) = 16 of every head in the pool: 16 * 4 = 64, 8 stay.
TEST_CASE("headkv's budgets follow its table") {
  auto policy = parse_policy("headkv:budget=32,obs=8,table=t");
  policy.budget.division.shares = {0.5, 0.25, 0.21875, 0.03125};
  const budget_plan plan(policy, dims_of(2, 2));
  const auto budget = [&](int layer, int head) {
    return plan.budget(500, layer, head, 100, false);
  };
  CHECK(budget(0, 0) == 8 + 32 + 8);
  CHECK(budget(0, 1) == 8 + 16 + 8);
  CHECK(budget(1, 0) == 8 + 14 + 8);
  CHECK(budget(1, 1) == 8 + 2 + 8);
  CHECK(plan.even_budget(500, 0, 100, false) == 32);
  CHECK_THROWS_WITH_AS(budget_plan(policy, dims_of(2, 3)),
                       "headkv: the table has 4 heads, the model 2 layers x 3 KV heads",
                       spec_error);
}

TEST_CASE("one budget over all layers and heads") {
  CHECK(budget_plan(parse_policy("dbtrimkv:budget=9"), dims_of(4, 3)).total(50, false) == 108);
  CHECK(budget_plan(parse_policy("dbtrimkv:total=100"), dims_of(4, 3)).total(50, false) == 100);
  CHECK(budget_plan(parse_policy("h2o:budget=10%+global"), dims_of(4, 3)).total(49, false) == 60);
  CHECK(budget_plan(parse_policy("h2o+global:total=50"), dims_of(4, 3)).total(49, false) == 50);
  CHECK_THROWS_AS(parse_policy("dbtrimkv:budget=9,total=100"), spec_error);
  CHECK_THROWS_AS(parse_policy("h2o:budget=9+global:total=100"), spec_error);
  CHECK_THROWS_AS(parse_policy("h2o+global:total=100+confidence:high=3,low=4"), spec_error);
}

TEST_CASE("divisions and two stages are refused by name where they mean nothing") {
  const auto error = [](const char* spec) -> std::string {
    try {
      parse_policy(spec);
    } catch (const spec_error& e) {
      return e.what();
    }
    return "";
  };
  for (const char* base : {"trimkv", "rkv", "knorm", "keydiff"}) {
    for (const char* modifier : {"critical", "adakv"}) {
      const auto why = error((std::string(base) + ":budget=9+" + modifier).c_str());
      CHECK(why.find(modifier) == 0);
      CHECK(why.find(std::string("those of ") + base) != std::string::npos);
    }
  }
  CHECK(error("trimkv:budget=9+critical").find("score=exp") != std::string::npos);
  CHECK(error("trimkv:budget=9,score=exp+critical+adakv").empty());
  CHECK(error("adakv:budget=9+adakv").find("already") != std::string::npos);
  CHECK(error("adakv:budget=9+global").find("already") != std::string::npos);
  CHECK(error("h2o:budget=9+adakv+global").find("give one") != std::string::npos);
  CHECK(error("tova:budget=9+adakv").find("scope=head") != std::string::npos);
  CHECK(error("pyramidkv:budget=9+global").find("pyramid") != std::string::npos);
  CHECK(error("h2o:budget=9+pyramid+global").find("pyramid") != std::string::npos);
  CHECK(error("h2o:budget=9+pyramid+adakv").empty());
  CHECK(error("kept:file=x+critical").find("precision only") != std::string::npos);
  CHECK(error("snapkv:budget=9,kernel=4").find("odd") != std::string::npos);
}

TEST_CASE("a policy has its own trigger where none is given") {
  CHECK(parse_policy("snapkv:budget=9").trigger.prefill_only);
  CHECK(!parse_policy("snapkv:budget=9+every:n=3").trigger.prefill_only);
  CHECK(parse_policy("rkv:budget=9").trigger.every == 128);
  CHECK(parse_policy("scissorhands:budget=9").trigger.every == 1);
  CHECK(without_modifier(parse_policy("snapkv:budget=9+critical+int8"), "critical").resolved ==
        parse_policy("snapkv:budget=9+int8").resolved);
}

}  // namespace
}  // namespace kvreplay::policies
