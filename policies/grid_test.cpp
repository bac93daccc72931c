#include "policies/grid.hpp"

#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

namespace kvreplay::policies {
namespace {

using texts = std::vector<std::string>;

std::string complaint(std::string_view spec) {
  try {
    const spec_grid grid(spec);
  } catch (const spec_error& e) {
    return e.what();
  }
  return "";
}

TEST_CASE("ranges include their end and are written as their numbers are") {
  // Truncating (b - a) / s loses the end of the first and third.
  CHECK(range_values("0.01..0.03..0.002", "x") == texts{"0.01", "0.012", "0.014", "0.016", "0.018",
                                                        "0.02", "0.022", "0.024", "0.026", "0.028",
                                                        "0.03"});
  CHECK(range_values("-0.8..-0.4..0.1", "x") == texts{"-0.8", "-0.7", "-0.6", "-0.5", "-0.4"});
  CHECK(range_values("0.1..0.3..0.1", "x") == texts{"0.1", "0.2", "0.3"});
  CHECK(range_values("8..11", "x") == texts{"8", "9", "10", "11"});
  CHECK(range_values("8..8", "x") == texts{"8"});
  CHECK(range_values("64..16..-16", "x") == texts{"64", "48", "32", "16"});
  CHECK(range_values("10%..30%..10%/75%", "x") == texts{"10%", "20%", "30%", "75%"});
  CHECK(range_values("1e-3..3e-3..1e-3", "x") == texts{"0.001", "0.002", "0.003"});
  CHECK(range_values("128/256", "x") == texts{"128", "256"});
}

TEST_CASE("a grid is the product of its axes, the last turning fastest") {
  const spec_grid grid("confkv:tau=0.3..0.9..0.3,high=128/256+pyramid:beta=2/4+int8");
  REQUIRE(grid.axes().size() == 3);
  CHECK(grid.axes()[0].name == "tau");
  CHECK(grid.axes()[2].name == "pyramid.beta");
  CHECK(grid.size() == 12);
  CHECK(grid.spec(0) == "confkv:tau=0.3,high=128+pyramid:beta=2+int8");
  CHECK(grid.spec(1) == "confkv:tau=0.3,high=128+pyramid:beta=4+int8");
  CHECK(grid.spec(11) == "confkv:tau=0.9,high=256+pyramid:beta=4+int8");
  std::set<std::string> all;
  for (std::int64_t i = 0; i < grid.size(); ++i) {
    all.insert(grid.spec(i));
    CHECK(grid.number_of(grid.index_of(i)) == i);
  }
  CHECK(all.size() == 12);
  CHECK(spec_grid("full").size() == 1);
  CHECK(spec_grid("full").spec(0) == "full");
}

TEST_CASE("what cannot be a grid is one line") {
  CHECK(complaint("window:budget=8..32..0").find("step 0") != std::string::npos);
  CHECK(complaint("window:budget=8..32..-8").find("away from the end") != std::string::npos);
  CHECK(complaint("confkv:tau=0.5/0.5").find("stands twice") != std::string::npos);
  CHECK(complaint("window:budget=8//16").find("empty value") != std::string::npos);
  CHECK(complaint("confkv:tau=0.1..0.5").find("needs a step") != std::string::npos);
  CHECK(complaint("window:budget=1..5%..1").find("mixes units") != std::string::npos);
  CHECK(complaint("window:budget=a..b").find("no range") != std::string::npos);
  CHECK(complaint("window:budget=1..2..3..4").find("no range") != std::string::npos);
  CHECK(complaint("window:budget=1..1e9").find("more than") != std::string::npos);
  CHECK(complaint("window:budgt=1/2").find("did you mean 'budget'") != std::string::npos);
  CHECK(complaint("widow:budget=1/2").find("unknown policy") != std::string::npos);
  CHECK(complaint("confkv:mass=log/max").find("mass") != std::string::npos);  // no number
  CHECK(complaint("confkv:high=8/16") != "");  // below recent at every point
  CHECK(complaint("confkv:high=8/128") == "");
}

}  // namespace
}  // namespace kvreplay::policies
