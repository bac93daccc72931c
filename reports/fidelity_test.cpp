#include "reports/fidelity.hpp"

#include <doctest/doctest.h>

#include <string>
#include <vector>

namespace kvreplay::reports {
namespace {

struct scores {
  std::string policy;
  double recall, proxy, kl;
};

std::vector<result> rows_of(const std::string& trace, const std::vector<scores>& all) {
  std::vector<result> out;
  for (const auto& s : all) {
    result open, closed;
    open.trace = closed.trace = trace;
    open.policy = closed.policy = s.policy;
    closed.mode = "closed";
    open.quality.attention_recall = s.recall;
    open.quality.kl_proxy = s.proxy;
    closed.quality.logit_kl = s.kl;
    out.push_back(open);
    out.push_back(closed);
  }
  return out;
}

const rank_agreement& find(const fidelity& f, const std::string& trace, const std::string& open) {
  for (const auto& a : f.agreements) {
    if (a.trace == trace && a.open == open && a.closed == "logit_kl") return a;
  }
  FAIL("no agreement of " << open);
  return f.agreements.front();
}

const std::vector<scores> first{
    {"full", 1, 0, 0}, {"a", .9, .1, .1}, {"b", .8, .2, .2}, {"c", .85, .3, .3}, {"d", .5, .4, .4}};

TEST_CASE("orders by hand: one pair against the closed loop") {
  const auto f = measure_fidelity(rows_of("t", first));
  CHECK(f.policies == std::vector<std::string>{"a", "b", "c", "d"});  // full says nothing
  const auto& proxy = find(f, "t#0", "kl_proxy");
  CHECK(*proxy.spearman == doctest::Approx(1));
  CHECK(proxy.inversions.empty());
  const auto& recall = find(f, "t#0", "attention_recall");
  CHECK(*recall.spearman == doctest::Approx(-0.8));
  CHECK(*recall.kendall == doctest::Approx(-4.0 / 6));
  REQUIRE(recall.inversions.size() == 1);
  CHECK(f.policies[recall.inversions[0].worse] == "c");
  CHECK(f.policies[recall.inversions[0].better] == "b");
  CHECK(*recall.spearman_ci.first <= -0.8);
  CHECK(fidelity_line(f).find("4 policies, 1 text: kl_proxy 1.00") != std::string::npos);
}

TEST_CASE("several texts: the mean, over the policies that all of them have") {
  auto rows = rows_of("t", first);
  auto second = first;
  second.pop_back();
  std::swap(second[1].proxy, second[3].proxy);
  for (auto& r : rows_of("u", second)) rows.push_back(r);
  const auto f = measure_fidelity(rows);
  CHECK(f.policies.size() == 3);
  CHECK(*find(f, "t#0", "kl_proxy").spearman == doctest::Approx(1));
  CHECK(*find(f, "u#0", "kl_proxy").spearman == doctest::Approx(-1));
  CHECK(*find(f, "", "kl_proxy").spearman == doctest::Approx(0));
}

TEST_CASE("the line is read back from the file, and other files are refused") {
  const auto f = measure_fidelity(rows_of("t", first));
  CHECK(read_fidelity_line(to_json(f, {}), "f.json") == fidelity_line(f));
  for (const char* text : {"", "{", "[]", "{\"schema\": \"kvreplay.results/1\"}"}) {
    CHECK_THROWS_AS(read_fidelity_line(text, "f.json"), report_error);
  }
  auto few = first;
  few.resize(3);
  CHECK_THROWS_AS(measure_fidelity(rows_of("t", few)), report_error);
}

}  // namespace
}  // namespace kvreplay::reports
