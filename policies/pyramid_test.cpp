#include <doctest/doctest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <numeric>
#include <string>

#include "policies/budget.hpp"

namespace kvreplay::policies {
namespace {

pyramid_rule rule_of(double beta, double total = 1, bool exact = true) {
  return {true, beta, total, exact};
}

std::int64_t sum_of(const std::vector<int>& shares) {
  return std::accumulate(shares.begin(), shares.end(), std::int64_t{0});
}

TEST_CASE("shares by hand") {
  // 48, 37.33, 26.67, 16: the remainder goes to layer 2.
  CHECK(pyramid_shares(4, 32, rule_of(2), 1) == std::vector<int>{48, 37, 27, 16});
  // 96, 74.67, 53.33, 32: to layer 1.
  CHECK(pyramid_shares(4, 64, rule_of(2), 1) == std::vector<int>{96, 75, 53, 32});
  // 4.5, 3, 1.5: a tie, to the lower layer.
  CHECK(pyramid_shares(3, 3, rule_of(2), 1) == std::vector<int>{5, 3, 1});
  // 15, 11.67, 8.33, 5, halved: 7.5, 5.83, 4.17, 2.5 of 20.
  CHECK(pyramid_shares(4, 10, rule_of(2, 0.5), 1) == std::vector<int>{8, 6, 4, 2});
  CHECK(pyramid_shares(5, 7, rule_of(1), 1) == std::vector<int>(5, 7));
}

TEST_CASE("one layer has the budget") {
  CHECK(pyramid_shares(1, 37, rule_of(20), 1) == std::vector<int>{37});
  CHECK(pyramid_shares(1, 37, rule_of(20, 1, false), 1) == std::vector<int>{37});
  CHECK(pyramid_shares(1, 1, rule_of(2), 1) == std::vector<int>{1});
}

TEST_CASE("the sum is exact, shares fall, none is below the least") {
  for (const int layers : {1, 2, 3, 4, 7, 12, 30, 32, 61}) {
    for (const int budget : {1, 2, 3, 7, 48, 100, 511, 4096}) {
      for (const double beta : {1.0, 1.5, 2.0, 3.0, 20.0, 1e6}) {
        for (const double total : {0.3, 0.5, 0.884, 1.0, 1.7}) {
          for (const int least : {1, 8}) {
            const double wanted = std::floor(total * budget * layers + 0.5);
            if (wanted < static_cast<double>(layers) * least) {
              CHECK_THROWS_AS(pyramid_shares(layers, budget, rule_of(beta, total), least),
                              spec_error);
              continue;
            }
            const std::vector<int> shares =
                pyramid_shares(layers, budget, rule_of(beta, total), least);
            CHECK(shares.size() == static_cast<size_t>(layers));
            CHECK(sum_of(shares) == static_cast<std::int64_t>(wanted));
            CHECK(std::is_sorted(shares.rbegin(), shares.rend()));
            CHECK(shares.back() >= least);
          }
        }
      }
    }
  }
}

TEST_CASE("layers below the least are lifted, one at a time from the layer that has most") {
  // From 19.5 down to 0.5; checked against the rule carried out literally.
  const std::vector<int> plain = pyramid_shares(5, 10, rule_of(20), 1);
  CHECK(sum_of(plain) == 50);
  for (const int least : {2, 4, 6, 8, 9, 10}) {
    std::vector<int> expected = plain;
    int excess = 0;
    for (int& share : expected) {
      excess += std::max(0, least - share);
      share = std::max(share, least);
    }
    for (; excess > 0; --excess) {
      const int most = *std::max_element(expected.begin(), expected.end());
      --*std::find(expected.rbegin(), expected.rend(), most);  // ties: the deeper
    }
    CHECK(pyramid_shares(5, 10, rule_of(20), least) == expected);
  }
  // 15, 10, 5 with least 9: 4 from the first, 11, 10, 9.
  CHECK(pyramid_shares(3, 10, rule_of(2), 9) == std::vector<int>{11, 10, 9});
  // With least 8: 12, 10, 8. With least 10, everything is level.
  CHECK(pyramid_shares(3, 10, rule_of(2), 8) == std::vector<int>{12, 10, 8});
  CHECK(pyramid_shares(3, 10, rule_of(2), 10) == std::vector<int>{10, 10, 10});
  CHECK_THROWS_WITH_AS(pyramid_shares(3, 10, rule_of(2), 11),
                       "pyramid: budget 10 x total 1 over 3 layers gives 30 entries, too few for "
                       "the 11 that every layer keeps (sinks + recent, at least 1)",
                       spec_error);
}

TEST_CASE("large numbers neither overflow nor take long") {
  const std::vector<int> shares = pyramid_shares(64, 1'000'000'000, rule_of(20), 900'000'000);
  CHECK(sum_of(shares) == 64'000'000'000);
  CHECK(*std::min_element(shares.begin(), shares.end()) == 900'000'000);
  CHECK(pyramid_shares(2, INT_MAX, rule_of(20), 1).front() == INT_MAX);
}

TEST_CASE("exact=0 is PyramidKV's published progression") {
  // Cap 128, window 8, 32 layers: 242, 235, ..., 25, in total 4272 where 4096 were asked for.
  std::vector<int> shares = pyramid_shares(32, 128 - 8, rule_of(20, 1, false), 1);
  for (int& share : shares) share += 8;
  CHECK(shares[0] == 242);
  CHECK(shares[1] == 235);
  CHECK(shares[31] == 25);
  CHECK(sum_of(shares) == 4272);
  // The overspend for caps 64, 128, 512: 11.7 %, 4.3 %, 2.7 %.
  const auto overspend = [](int cap) {
    const double spent =
        static_cast<double>(sum_of(pyramid_shares(32, cap - 8, rule_of(20, 1, false), 1)));
    return std::round(((spent + 32 * 8) / (32.0 * cap) - 1) * 1000) / 10;
  };
  CHECK(overspend(64) == 11.7);
  CHECK(overspend(128) == 4.3);
  CHECK(overspend(512) == 2.7);
  // Published: 2, 1, 0. No layer falls to zero here.
  CHECK(pyramid_shares(3, 1, rule_of(20, 1, false), 1) == std::vector<int>{2, 1, 1});
}

model_dims four_layers() { return {4, 3, 16, 16, {}, {}}; }

TEST_CASE("under a gate, high and low both become shares") {
  const budget_plan plan(parse_policy("confkv-l:high=32,low=64,recent=8"), four_layers());
  for (int l = 0; l < 4; ++l) {
    CHECK(plan.share(200, l, true) == std::vector<int>{48, 37, 27, 16}[static_cast<size_t>(l)]);
    CHECK(plan.share(200, l, false) == std::vector<int>{96, 75, 53, 32}[static_cast<size_t>(l)]);
  }
  const budget_plan gradual(parse_policy("confkv-l:high=32,low=64,recent=8,shrink=2"),
                            four_layers());
  CHECK(gradual.budget(200, 3, 0, 200, true) == 32);
  CHECK(gradual.budget(201, 3, 0, 33, true) == 31);
  CHECK(gradual.budget(202, 3, 0, 17, true) == 16);
  const budget_plan middle(parse_policy("confkv-l:high=32,low=97,recent=8,gate=constant"),
                           four_layers());
  CHECK(middle.share(9, 0, true) == pyramid_shares(4, 64, rule_of(2), 8)[0]);
}

TEST_CASE("the base's protection is the least share; h2o's recent is not") {
  const budget_plan confkv(parse_policy("confkv-l:high=32,low=64,recent=20,sinks=4,beta=20"),
                           four_layers());
  CHECK(confkv.share(9, 3, true) == 24);
  const budget_plan h2o(parse_policy("h2o:budget=32+pyramid:beta=20"), four_layers());
  CHECK(h2o.share(9, 3, false) == 2);  // 1.6 by largest remainder
  CHECK_THROWS_AS(
      budget_plan(parse_policy("confkv-l:high=64,low=64,recent=64,total=0.9"), four_layers()),
      spec_error);
}

TEST_CASE("a pyramid over a share of the positions") {
  const budget_plan plan(parse_policy("h2o:budget=20%+pyramid"), four_layers());
  for (const int step : {0, 4, 9, 99, 159, 1000}) {
    const std::int64_t b = std::max(1, static_cast<int>(std::floor(0.2 * (step + 1) + 0.5)));
    const std::vector<int> shares = pyramid_shares(4, b, rule_of(2), 1);
    for (int l = 0; l < 4; ++l) {
      CHECK(plan.budget(step, l, 0, 999, false) == shares[static_cast<size_t>(l)]);
    }
  }
}

}  // namespace
}  // namespace kvreplay::policies
