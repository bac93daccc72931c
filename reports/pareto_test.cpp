#include "reports/pareto.hpp"

#include <doctest/doctest.h>

#include <vector>

#include "reports/aggregate.hpp"

namespace kvreplay::reports {
namespace {

result row_of(double bytes, double error, double recall) {
  result row;
  row.trace = "t";
  row.policy = "p";
  row.memory.mean_bytes = bytes;
  row.quality.output_rel_l2 = error;
  row.quality.attention_recall = recall;
  return row;
}

std::vector<int> marks(const std::vector<result>& rows) {
  std::vector<int> out;
  for (const auto& row : rows) out.push_back(row.pareto ? static_cast<int>(*row.pareto) : -1);
  return out;
}

TEST_CASE("the front holds what nobody beats, twins included") {
  std::vector<result> rows = {row_of(10, 0.5, 0.5), row_of(20, 0.2, 0.8), row_of(20, 0.2, 0.9),
                              row_of(30, 0.2, 0.9), row_of(30, 0.1, 0.1), row_of(5, 0.5, 0.2),
                              row_of(40, 0.9, 1.0)};
  rows.push_back(row_of(1, 0.01, 1));
  rows.back().status = "failed";
  rows.push_back(row_of(1, 0.01, 1));
  rows.back().sequence = 1;  // another sequence: does not compare
  rows.push_back(row_of(1, 0.01, 1));
  rows.back().quality.output_rel_l2.reset();
  mark_pareto(rows, "output_rel_l2");
  CHECK(marks(rows) == std::vector<int>{0, 1, 1, 0, 1, 1, 0, -1, 1, -1});
  for (auto& row : rows) row.pareto.reset();
  mark_pareto(rows, "attention_recall");  // more is better
  CHECK(marks(rows) == std::vector<int>{0, 0, 0, 0, 0, 0, 0, -1, 1, 1});
}

TEST_CASE("the quality of a set is the best one that all good rows have") {
  std::vector<result> rows = {row_of(10, 0.5, 0.5), row_of(20, 0.2, 0.8)};
  CHECK(common_quality(rows) == "output_rel_l2");
  rows[0].quality.kl_proxy = 1;
  CHECK(common_quality(rows) == "output_rel_l2");
  rows[1].status = "failed";
  CHECK(common_quality(rows) == "kl_proxy");
  rows[0].status = "failed";
  CHECK(common_quality(rows).empty());
}

TEST_CASE("aggregated rows are means with an interval, sums of tokens and largest peaks") {
  std::vector<result> rows = {row_of(10, 0.5, 0.5), row_of(20, 0.2, 0.9), row_of(30, 0.8, 0.7)};
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].sequence = static_cast<int>(i);
    rows[i].tokens.decoded = 100;
    rows[i].memory.peak_bytes = 10.0 * static_cast<double>(i);
    rows[i].note = i == 0 ? "" : "partial";
  }
  rows[1].quality.ppl = 3;  // not all have it
  rows.push_back(row_of(7, 0.1, 0.1));
  rows.back().policy = "alone";
  const auto all = aggregate(rows);
  REQUIRE(all.size() == 1);
  const auto& mean = all[0];
  CHECK(mean.sequence == -1);
  CHECK(*mean.sequences == 3);
  CHECK(mean.trace == "t");
  CHECK(mean.note == "partial");
  CHECK(mean.tokens.decoded == 300);
  CHECK(*mean.memory.mean_bytes == doctest::Approx(20));
  CHECK(*mean.memory.peak_bytes == 20);
  CHECK(*mean.quality.output_rel_l2 == doctest::Approx(0.5));
  CHECK(!mean.quality.ppl);
  const auto interval = mean.quality_ci.at("output_rel_l2");
  CHECK(interval.first >= 0.2);
  CHECK(interval.second <= 0.8);
  CHECK(interval.first < interval.second);
}

}  // namespace
}  // namespace kvreplay::reports
