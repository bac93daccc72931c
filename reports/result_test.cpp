#include "reports/result.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "reports/test_support.hpp"

using namespace kvreplay::reports;
using testing::full_row;

namespace {

std::vector<std::string> differences_of(const result& a, const result& b) {
  return differences(report{{}, {a}}, report{{}, {b}});
}

// Names of the numbers in walking order.
std::vector<std::string> names(const result& r) {
  std::vector<std::string> out;
  for_each_number(r, [&](std::string_view section, std::string_view name, const maybe&) {
    out.push_back(fmt::format("{}.{}", section, name));
  });
  return out;
}

// The row with its n-th number changed by `change`.
result changed(result r, std::size_t n, const std::function<void(maybe&)>& change) {
  std::size_t i = 0;
  for_each_number(r, [&](std::string_view, std::string_view, maybe& value) {
    if (i++ == n) change(value);
  });
  return r;
}

}  // namespace

TEST_CASE("the walk meets every number once, in the order of results.json") {
  const std::vector<std::string> all = names(full_row());
  CHECK(all.size() == 3 + 12 + 32 + 2 + 4 + 7 + 22 + 2 + 2);
  CHECK(std::set<std::string>(all.begin(), all.end()).size() == all.size());
  CHECK(all.front() == "tokens.prompt");
  CHECK(all[3] == "memory.mean_bytes");
  CHECK(all[15] == "quality.attention_recall");
  CHECK(all[47] == "quality.kept_share.answer");
  CHECK(all.back() == "sweep.sequences");
}

TEST_CASE("the walk writes counts back") {
  result r;
  for_each_number(r, [](std::string_view section, std::string_view name, maybe& value) {
    if (section == "tokens" && name == "scored") value = 12;
  });
  CHECK(r.tokens.scored == 12);
  CHECK(r.tokens.prompt == 0);
}

TEST_CASE("every single changed number is found, times apart") {
  const result a = full_row();
  const std::vector<std::string> all = names(a);
  for (std::size_t n = 0; n < all.size(); ++n) {
    CAPTURE(all[n]);
    const bool time = all[n].starts_with("time.");
    const bool count = all[n].starts_with("tokens.");
    const result ulp = changed(a, n, [&](maybe& v) {
      v = count ? *v + 1 : std::nextafter(*v, std::numeric_limits<double>::infinity());
    });
    const auto found = differences_of(a, ulp);
    REQUIRE(found.size() == (time ? 0 : 1));
    if (!time) CHECK(found[0].find(all[n] + ":") != std::string::npos);
    const result gone = changed(a, n, [](maybe& v) { v.reset(); });
    CHECK(differences_of(a, gone).size() == (time ? 0 : 1));
    CHECK(differences_of(gone, a).size() == (time ? 0 : 1));
  }
}

TEST_CASE("every changed text is found") {
  const std::vector<std::function<void(result&)>> changes = {
      [](result& r) { r.trace += "x"; },
      [](result& r) { r.trace_fingerprint += "x"; },
      [](result& r) { r.sequence++; },
      [](result& r) { r.layers += "x"; },
      [](result& r) { r.policy += "x"; },
      [](result& r) { r.name += "x"; },
      [](result& r) { r.precision += "x"; },
      [](result& r) { r.mode = "open"; },
      [](result& r) { r.status = "failed"; },
      [](result& r) { r.note.clear(); },
      [](result& r) { r.seed++; },
      [](result& r) { r.params[0].second = "65"; },
      [](result& r) { std::swap(r.params[0], r.params[1]); },
      [](result& r) { r.params.pop_back(); },
      [](result& r) { r.quality.more.pop_back(); },
      [](result& r) { r.quality_ci["ppl"].second = 1; },
  };
  const result a = full_row();
  CHECK(differences_of(a, a).empty());
  for (const auto& change : changes) {
    result b = a;
    change(b);
    CHECK(differences_of(a, b).size() == 1);
    CHECK(differences_of(b, a).size() == 1);
  }
  result b = a;
  b.quality_ci.clear();
  CHECK(differences_of(a, b).size() == 2);
}

TEST_CASE("order and number of rows count, the tool does not") {
  const result a = full_row(1), b = full_row(2);
  CHECK_FALSE(differences(report{{}, {a, b}}, report{{}, {b, a}}).empty());
  CHECK(differences(report{{}, {a}}, report{{}, {a, a}}).size() == 1);
  tool_info other;
  other.command = "x";
  other.threads = 9;
  CHECK(differences(report{{}, {a}}, report{other, {a}}).empty());
}

TEST_CASE("numbers that are not finite are emptied and named") {
  const result a = full_row();
  const std::vector<std::string> all = names(a);
  for (std::size_t n = 3; n < all.size(); ++n) {
    for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
      const result clean = finite(changed(a, n, [&](maybe& v) { v = bad; }));
      CAPTURE(all[n]);
      CHECK(clean.note == fmt::format("a note; {} was {}", all[n], bad));
      changed(clean, n, [](maybe& v) { CHECK_FALSE(v.has_value()); });
    }
  }
  result b;
  b.quality_ci["ppl"] = {1, HUGE_VAL};
  CHECK(finite(b).quality_ci.empty());
  CHECK(finite(b).note == "quality_ci.ppl was inf");
  CHECK(differences_of(finite(a), a).empty());
}
