// Every row of testdata/expected.json, which an independent float64 implementation computed.
#include <doctest/doctest.h>

#include <cmath>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "policies/policy.hpp"
#include "replay/open_loop.hpp"
#include "replay/test_support.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

constexpr double recall_tolerance = 2e-3, output_tolerance = 5e-3;

void check_near(double found, double expected, double tolerance) {
  CHECK(std::fabs(found - expected) <= tolerance);
  if (!(std::fabs(found - expected) <= tolerance)) MESSAGE(found, " against ", expected);
}

void check_kept(const traces::reader& trace, const lane_output& lane, const nlohmann::json& kept) {
  std::map<std::string, std::vector<std::int32_t>> found;
  for_each_kept_set(
      trace, 0, lane, [&](std::int64_t step, int layer, int head, const auto& positions) {
        found[std::to_string(step) + "/" + std::to_string(layer) + "/" + std::to_string(head)] =
            positions;
      });
  for (const auto& [key, positions] : kept.items()) {
    CAPTURE(key);
    REQUIRE(found.count(key) == 1);
    CHECK(found[key] == positions.get<std::vector<std::int32_t>>());
  }
}

void check_row(const traces::reader& trace, const lane_output& lane,
               const nlohmann::json& expected) {
  const auto& row = lane.row;
  REQUIRE_MESSAGE(row.status == "ok", row.note);
  check_near(*row.quality.attention_recall, expected["attention_recall"], recall_tolerance);
  check_near(*row.quality.recall_bound, expected["recall_bound"], recall_tolerance);
  check_near(*row.quality.output_rel_l2, expected["output_rel_l2"], output_tolerance);
  CHECK(*row.memory.mean_entries ==
        doctest::Approx(expected["mean_entries"].get<double>()).epsilon(1e-12));
  CHECK(*row.memory.peak_entries ==
        doctest::Approx(expected["peak_entries"].get<double>()).epsilon(1e-12));
  CHECK(*row.memory.mean_bytes ==
        doctest::Approx(expected["mean_bytes"].get<double>()).epsilon(1e-12));
  CHECK(*row.memory.peak_bytes == expected["peak_bytes"].get<double>());
  if (row.confidence.low_share) {
    CHECK(*row.confidence.low_share == doctest::Approx(expected["low_conf"].get<double>()));
  }
  check_kept(trace, lane, expected["kept"]);
}

TEST_CASE("golden rows are reproduced") {
  std::ifstream file(testdata("replay", "expected.json"));
  const auto golden = nlohmann::json::parse(file);
  for (const auto& [name, rows] : golden["replay"].items()) {
    CAPTURE(name);
    const traces::reader trace(testdata("traces", name + ".h5"));
    std::vector<policies::policy> policies;
    for (const auto& row : rows) {
      policies.push_back(policies::parse_policy(row["policy"].get<std::string>()));
    }
    open_loop_options options;
    options.kept = true;
    const auto lanes = replay_open(trace, 0, policies, options);
    REQUIRE(lanes.size() == rows.size());
    for (size_t i = 0; i < lanes.size(); ++i) {
      const std::string spec = rows[i]["policy"];
      CAPTURE(spec);
      check_row(trace, lanes[i], rows[i]);
    }
  }
}

}  // namespace
}  // namespace kvreplay::replay
