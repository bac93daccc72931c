#include "replay/redundancy.hpp"

#include <doctest/doctest.h>

#include <cmath>

namespace kvreplay::replay {
namespace {

// R-KV's keys (1,0), (1,.1), (0,1), (1,.05): column means .4984, .2736, .0374, .0125.
TEST_CASE("R-KV's own example") {
  const std::vector<float> keys{1, 0, 1, 0.1F, 0, 1, 1, 0.05F};
  const auto redundancy = redundancies(keys, 2);
  const double expected[] = {0.3285, 0.2623, 0.2071, 0.2020};
  const double means[] = {0.4984, 0.2736, 0.0374, 0.0125};
  for (size_t i = 0; i < 4; ++i) {
    CHECK(redundancy[i] == doctest::Approx(expected[i]).epsilon(3e-4));
    // The softmax's differences of logarithms give the means back.
    CHECK(std::log(redundancy[i] / redundancy[3]) ==
          doctest::Approx(means[i] - means[3]).epsilon(1e-2));
  }
}

TEST_CASE("keys without near-duplicates are equally redundant; a zero key harms nobody") {
  for (const double r : redundancies(std::vector<float>{1, 0, 0, 1, -1, 0, 0, -1}, 2)) {
    CHECK(r == doctest::Approx(0.25));
  }
  for (const double r : redundancies(std::vector<float>{0, 0, 1, 0}, 2)) {
    CHECK(r == doctest::Approx(0.5));
  }
}

}  // namespace
}  // namespace kvreplay::replay
