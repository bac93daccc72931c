#include "reports/correlation.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

namespace kvreplay::reports {
namespace {

TEST_CASE("correlations against values worked out by hand") {
  const std::vector<double> x{1, 2, 3, 4, 5}, y{2, 1, 4, 3, 5}, tied{1, 1, 2, 3, 3};
  CHECK(pearson(x, y) == doctest::Approx(0.8));
  CHECK(spearman(x, y) == doctest::Approx(0.8));  // 1 - 6 * 4 / (5 * 24)
  CHECK(kendall(x, y) == doctest::Approx(0.6));   // 8 pairs agree, 2 do not
  CHECK(ranks_of(tied) == std::vector<double>{1.5, 1.5, 3, 4.5, 4.5});
  CHECK(kendall(x, tied) == doctest::Approx(8 / std::sqrt(10.0 * 8.0)));
  CHECK(spearman(x, tied) == doctest::Approx(9 / std::sqrt(10 * 9.0)));
  const std::vector<double> cubes{1, 8, 27, 64, 125}, down{5, 4, 3, 2, 1};
  CHECK(spearman(x, cubes) == doctest::Approx(1));
  CHECK(pearson(x, cubes) < 0.99);
  CHECK(kendall(x, down) == doctest::Approx(-1));
  CHECK(std::isnan(pearson(x, std::vector<double>(5, 2.0))));
  CHECK(std::isnan(kendall({}, {})));
}

}  // namespace
}  // namespace kvreplay::reports
