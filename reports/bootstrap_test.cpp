#include "reports/bootstrap.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <random>

using namespace kvreplay::reports;

namespace {

using sequences = std::vector<std::vector<double>>;

std::vector<double> normal(std::mt19937_64& engine, std::size_t n, double mean) {
  std::normal_distribution<double> draw(mean, 1);
  std::vector<double> out(n);
  for (double& x : out) x = draw(engine);
  return out;
}

}  // namespace

TEST_CASE("constant data has an interval without width") {
  for (const double x : {0.1, 1.0 / 3, -7e10, 0.0}) {
    const auto ends = bootstrap_mean(sequences(1, std::vector<double>(1000, x)));
    REQUIRE(ends.has_value());
    CHECK(ends->first == x);
    CHECK(ends->second == x);
  }
}

TEST_CASE("the same data gives the same interval, another seed another") {
  std::mt19937_64 engine(1);
  const sequences data = {normal(engine, 1000, 0)};
  const auto a = bootstrap_mean(data), b = bootstrap_mean(data);
  CHECK(a == b);
  bootstrap_options other;
  other.seed = 1;
  CHECK(a != bootstrap_mean(data, other));
}

TEST_CASE("the interval covers the true mean about as often as it says") {
  std::mt19937_64 engine(2);
  int blocks = 0, whole = 0;
  for (int trial = 0; trial < 200; ++trial) {
    // 32 blocks of 64, and 20 sequences.
    const auto one = bootstrap_mean(sequences{normal(engine, 2048, 3)});
    blocks += one->first <= 3 && 3 <= one->second;
    sequences many;
    for (int s = 0; s < 20; ++s) many.push_back(normal(engine, 10, 3));
    const auto of_many = bootstrap_mean(many);
    whole += of_many->first <= 3 && 3 <= of_many->second;
  }
  // 95 % of 200 is 190; the percentile bootstrap of 20 units covers a little less than it says.
  CHECK(blocks >= 176);
  CHECK(blocks <= 199);
  CHECK(whole >= 172);
  CHECK(whole <= 199);
}

TEST_CASE("its width is that of the mean's standard error") {
  std::mt19937_64 engine(3);
  const auto ends = bootstrap_mean(sequences{normal(engine, 64 * 400, 0)});
  const double expected = 2 * 1.96 / std::sqrt(64 * 400.0);
  CHECK(ends->second - ends->first == doctest::Approx(expected).epsilon(0.15));
}

TEST_CASE("five sequences are drawn whole, four in blocks") {
  // Drawn whole, only multiples of 1/5 can come out; in blocks of 64 there are ten units, not five,
  // and the interval is narrower.
  sequences data;
  for (int s = 0; s < 5; ++s) data.emplace_back(128, s == 0 ? 1.0 : 0.0);
  const auto whole = bootstrap_mean(data);
  CHECK(std::abs(whole->second * 5 - std::round(whole->second * 5)) < 1e-12);
  bootstrap_options options;
  options.min_sequences = 6;
  const auto blocks = bootstrap_mean(data, options);
  CHECK(blocks->second < whole->second);
}

TEST_CASE("two points by hand: a draw of two from {0, 1} has mean 0, 1/2 or 1") {
  bootstrap_options options;
  options.block = 1;
  const auto ends = bootstrap_mean(sequences{{0, 1}}, options);
  CHECK(ends->first == 0);
  CHECK(ends->second == 1);
  // Each end has weight 1/4, so the middle 40 % lie at 1/2.
  options.level = 0.4;
  const auto middle = bootstrap_mean(sequences{{0, 1}}, options);
  CHECK(middle->first == 0.5);
  CHECK(middle->second == 0.5);
}

TEST_CASE("nothing where nothing can be said") {
  CHECK_FALSE(bootstrap_mean(sequences{}).has_value());
  CHECK_FALSE(bootstrap_mean(sequences{{}}).has_value());
  CHECK_FALSE(bootstrap_mean(sequences{std::vector<double>(64, 1.0)}).has_value());
  CHECK(bootstrap_mean(sequences{std::vector<double>(65, 1.0)}).has_value());
  CHECK_FALSE(bootstrap_mean(sequences{{1.0, std::nan("")}, {1.0}}).has_value());
  CHECK(bootstrap_mean(sequences{{1.0}, {}, {2.0}}).has_value());
}
