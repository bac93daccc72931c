#include "reports/details.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "reports/json.hpp"
#include "reports/pareto.hpp"
#include "reports/test_support.hpp"

using namespace kvreplay::reports;
using testing::full_row;

namespace {

row_details some_details() {
  row_details d;
  d.series["bytes"] = {{10, 11, 15}, {1024, 2048, 0.5}};
  d.series["confidence"] = {{10}, {1.0 / 3}};
  d.confidence_histogram.assign(confidence_bins, 2);
  d.heads = head_map{{0, 29}, 2, {1.0, 2.5, {}, 4.0}, {0.1, 0.2, 0.3, 0.4}, {{}, {}, {}, {}}};
  d.needle = {3, 9};
  return d;
}

result detailed_row() {
  result r = full_row();
  r.details = some_details();
  return r;
}

// Value of the line at a step.
double at(const point_series& s, std::int64_t step) {
  const auto right = std::lower_bound(s.step.begin(), s.step.end(), step) - s.step.begin();
  if (s.step[static_cast<std::size_t>(right)] == step) {
    return s.value[static_cast<std::size_t>(right)];
  }
  const auto i = static_cast<std::size_t>(right);
  const double share =
      static_cast<double>(step - s.step[i - 1]) / static_cast<double>(s.step[i] - s.step[i - 1]);
  return s.value[i - 1] + share * (s.value[i] - s.value[i - 1]);
}

std::string error_of(const std::string& from, const std::string& to) {
  std::string text = to_json({{}, {detailed_row()}});
  const std::size_t place = text.find(from);
  REQUIRE_MESSAGE(place != std::string::npos, from);
  try {
    (void)read_json(text.replace(place, from.size(), to), "r.json");
  } catch (const report_error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace

TEST_CASE("straight stretches cost two points and lose nothing") {
  std::vector<double> saw;
  for (int i = 0; i < 3000; ++i) saw.push_back(100 + i % 300);
  const point_series s = compact_series(512, saw);
  CHECK(s.step.size() == 20);
  for (int i = 0; i < 3000; ++i) CHECK(at(s, 512 + i) == doctest::Approx(100 + i % 300));
  CHECK(compact_series(5, std::vector<double>(400, 7.0)) == point_series{{5, 404}, {7, 7}});
  CHECK(compact_series(5, std::vector<double>{1.0}) == point_series{{5}, {1}});
  CHECK(compact_series(5, {}) == point_series{});
  CHECK(compact_series(5, std::vector<double>{1, std::nan(""), 3}) == point_series{{5, 7}, {1, 3}});
}

TEST_CASE("a restless line keeps every peak of 256 stretches in at most 512 points") {
  std::vector<double> noise;
  std::uint32_t state = 1;
  for (int i = 0; i < 100000; ++i) {
    state = state * 1664525 + 1013904223;
    noise.push_back(static_cast<double>(state >> 12) / 1048576.0);
  }
  noise[50001] = 9, noise[50002] = -9;
  const point_series s = compact_series(0, noise);
  CHECK(s.step.size() <= max_series_points);
  CHECK(s.step.size() > 500);
  CHECK(std::is_sorted(s.step.begin(), s.step.end()));
  CHECK(std::adjacent_find(s.step.begin(), s.step.end()) == s.step.end());
  CHECK(at(s, 50001) == 9);
  CHECK(at(s, 50002) == -9);
}

TEST_CASE("confidences are counted in 40 bins, 1 in the last") {
  const auto counts = confidence_counts(std::vector<double>{0, 0.0249, 0.025, 0.999, 1, 1.5, -1});
  CHECK(counts.size() == 40);
  CHECK(counts[0] == 2);
  CHECK(counts[1] == 1);
  CHECK(counts[39] == 2);
}

TEST_CASE("details come back from results.json and from the journal's line") {
  const result row = detailed_row();
  CHECK(*read_json(to_json({{}, {row, full_row()}}), "r.json").runs[0].details == *row.details);
  CHECK_FALSE(read_json(to_json({{}, {full_row()}}), "r.json").runs[0].details);
  CHECK(*read_json_line(to_json_line(row), "j:1").details == *row.details);
  result bad = row;
  bad.details->series["bytes"].value[1] = std::nan("");
  bad.details->heads->entries[0] = HUGE_VAL;
  const auto back = *read_json(to_json({{}, {bad}}), "r.json").runs[0].details;
  CHECK(back.series.at("bytes") == point_series{{10, 15}, {1024, 0.5}});
  CHECK_FALSE(back.heads->entries[0]);
}

TEST_CASE("details that no writer gives are refused by file and key") {
  const char* where = "runs[0].details";
  for (const auto& [from, to] : std::vector<std::pair<std::string, std::string>>{
           {"[10,11,15]", "[10,11]"},
           {"[10,11,15]", "[10,15,11]"},
           {"[10,11,15]", "[-1,11,15]"},
           {"[10,11,15]", "[10,11,1e3]"},
           {"[10,11,15]", "7"},
           {"[1024,2048,0.5]", "[1024,null,0.5]"},
           {"[1024,2048,0.5]", "[1024,\"x\",0.5]"},
           {"\"bytes\":{\"step\"", "\"butes\":{\"step\""},
           {"{\"step\":[10]", "{\"x\":1,\"step\":[10]"},
           {"\"layers\":[0,29]", "\"layers\":[29,0]"},
           {"\"layers\":[0,29]", "\"layers\":[0]"},
           {"\"kv_heads\":2", "\"kv_heads\":0"},
           {"\"kv_heads\":2", "\"kv_heads\":1048577"},
           {"\"kv_heads\":2", "\"kv_heads\":1e300"},
           {"[0.1,0.2,0.3,0.4]", "[0.1,0.2,0.3]"},
           {"[0.1,0.2,0.3,0.4]", "[0.1,0.2,0.3,true]"},
           {"\"confidence_histogram\":[2,", "\"confidence_histogram\":["},
           {"\"confidence_histogram\":[2,", "\"confidence_histogram\":[-2,"},
           {"\"needle\":[3,9]", "\"needle\":[9,3]"},
           {"\"needle\":[3,9]", "\"needle\":[3]"},
           {"\"needle\":[3,9]", "\"noodle\":[3,9]"}}) {
    CAPTURE(to);
    const std::string what = error_of(from, to);
    CHECK(what.starts_with("r.json"));
    CHECK(what.find(where) != std::string::npos);
  }
  CHECK(error_of("[10,11,15]", "[10,11,15e999]").find("is not JSON") != std::string::npos);
  std::string many = "[0";
  for (int i = 1; i < 600; ++i) many += "," + std::to_string(i);
  CHECK(error_of("[10,11,15]", many + "]").find("at most 512") != std::string::npos);
}

TEST_CASE("the comparison sees a changed detail, and none where a file left them out") {
  const report a{{}, {detailed_row()}};
  report b = a;
  CHECK(differences(a, b).empty());
  b.runs[0].details->heads->entries[0] = 1.5;
  CHECK(differences(a, b).size() == 1);
  b.runs[0].details.reset();
  CHECK(differences(a, b).empty());
  b.runs[0].details = row_details{};
  b.runs[0].details->needle = {3, 9};
  CHECK(differences(a, b).empty());
  b.runs[0].details->needle = {3, 10};
  CHECK(differences(a, b).size() == 1);
}

TEST_CASE("the front is what a comparison of every pair gives") {
  std::vector<result> rows;
  std::uint32_t state = 7;
  for (int i = 0; i < 400; ++i) {
    result r;
    r.trace = i % 3 == 0 ? "a" : "b";
    state = state * 1664525 + 1013904223;
    r.memory.mean_bytes = (state >> 20) % 40;
    state = state * 1664525 + 1013904223;
    r.quality.output_rel_l2 = (state >> 20) % 40;
    if (i % 17 == 0) r.status = "failed";
    if (i % 19 == 0) r.quality.output_rel_l2.reset();
    rows.push_back(r);
  }
  CHECK(ranking_metric(rows) == "output_rel_l2");
  rows[1].quality.logit_kl = 1;  // of one row: no ground to rank the others on
  CHECK(ranking_metric(rows) == "output_rel_l2");
  CHECK(ranking_metric(std::span(rows).subspan(1, 1)) == "logit_kl");
  CHECK(ranking_metric(std::span(rows).first(0)).empty());
  const auto front = pareto_front(rows, "output_rel_l2");
  const auto usable = [](const result& r) { return r.status == "ok" && r.quality.output_rel_l2; };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    bool expected = usable(rows[i]);
    for (const result& other : rows) {
      if (!expected || !usable(other) || other.trace != rows[i].trace) continue;
      const double db = *other.memory.mean_bytes - *rows[i].memory.mean_bytes;
      const double dq = *other.quality.output_rel_l2 - *rows[i].quality.output_rel_l2;
      if (db <= 0 && dq <= 0 && (db < 0 || dq < 0)) expected = false;
    }
    CHECK(front[i] == expected);
  }
}

TEST_CASE("first rows and the front keep their details, the others the needle") {
  std::vector<result> rows;
  for (int i = 0; i < 200; ++i) {
    result r = detailed_row();
    r.memory.mean_bytes = 1000 + i;
    r.quality.logit_kl = i == 150 ? 0.0 : 1.0 + i;
    if (i == 160) r.pareto = 1;
    rows.push_back(r);
  }
  trim_details(rows);
  for (int i = 0; i < 200; ++i) {
    const auto& r = rows[static_cast<std::size_t>(i)];
    CHECK(r.details->series.empty() == (i >= 32 && i != 150 && i != 160));
    CHECK(r.details->needle.size() == 2);
  }
}
