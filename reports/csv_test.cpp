#include "reports/csv.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>

#include "reports/test_support.hpp"
#include "reports/text.hpp"

using namespace kvreplay::reports;
using testing::full_row;

namespace {

using table = std::vector<std::vector<std::string>>;

// RFC 4180 to the letter but for the line end: anything it does not allow fails the test.
table parse_csv(const std::string& text) {
  table rows = {{}};
  std::size_t i = 0;
  while (i < text.size()) {
    std::string field;
    if (text[i] == '"') {
      for (++i;; ++i) {
        REQUIRE(i < text.size());
        if (text[i] != '"') {
          field += text[i];
        } else if (i + 1 < text.size() && text[i + 1] == '"') {
          field += text[i++];
        } else {
          break;
        }
      }
      ++i;
    } else {
      for (; i < text.size() && text[i] != ',' && text[i] != '\n'; ++i) {
        REQUIRE(text[i] != '"');
        REQUIRE(text[i] != '\r');
        field += text[i];
      }
    }
    rows.back().push_back(field);
    REQUIRE(i < text.size());
    REQUIRE((text[i] == ',' || text[i] == '\n'));
    if (text[i++] == '\n' && i < text.size()) rows.emplace_back();
  }
  return rows;
}

std::map<std::string, std::string> row_at(const table& t, std::size_t row) {
  std::map<std::string, std::string> out;
  REQUIRE(t[row].size() == t[0].size());
  for (std::size_t i = 0; i < t[0].size(); ++i) out[t[0][i]] = t[row][i];
  REQUIRE(out.size() == t[0].size());
  return out;
}

}  // namespace

TEST_CASE("every number stands under its flattened name and reads back exactly") {
  const result r = full_row();
  const table t = parse_csv(to_csv(std::vector<result>{r}));
  REQUIRE(t.size() == 2);
  auto row = row_at(t, 1);
  for_each_number(r, [&](std::string_view section, std::string_view name, const maybe& value) {
    const std::string text = row.at(fmt::format("{}.{}", section, name));
    CAPTURE(name);
    CHECK(std::strtod(text.c_str(), nullptr) == *value);
  });
  CHECK(row["trace"] == "t.h5");
  CHECK(row["params.budget"] == "64");
  CHECK(std::strtod(row["quality_ci.ppl.low"].c_str(), nullptr) == 1.0 / 3);
  CHECK(row["seed"] == "-7");
}

TEST_CASE("every row has every column; open columns are a union in name order") {
  result a, b;
  a.params = {{"z", "1"}};
  a.quality.more = {{"kept_share.b", 0.5}};
  b.params = {{"a", "2"}};
  b.quality.more = {{"kept_share.a", 0.25}};
  b.quality_ci["ppl"] = {1, 2};
  const table t = parse_csv(to_csv(std::vector<result>{a, b, result()}));
  REQUIRE(t.size() == 4);
  for (const auto& row : t) CHECK(row.size() == t[0].size());
  const auto place = [&](const std::string& name) {
    return std::find(t[0].begin(), t[0].end(), name) - t[0].begin();
  };
  CHECK(place("params.a") + 1 == place("params.z"));
  CHECK(place("quality.free_prefix") + 1 == place("quality.kept_share.a"));
  CHECK(place("quality.kept_share.a") + 1 == place("quality.kept_share.b"));
  CHECK(place("quality.kept_share.b") + 1 == place("quality_ci.ppl.low"));
  CHECK(place("quality_ci.ppl.high") + 1 == place("confidence.mean"));
  CHECK(row_at(t, 1)["quality.kept_share.a"].empty());
  CHECK(row_at(t, 2)["quality.kept_share.a"] == "0.25");
  CHECK(row_at(t, 3)["memory.mean_bytes"].empty());
  CHECK(parse_csv(to_csv(std::span<const result>())).size() == 1);
}

TEST_CASE("texts of any bytes neither break a row nor get lost") {
  for (const std::string& text : testing::nasty_texts()) {
    CAPTURE(text);
    result r = full_row();
    r.trace = r.note = text;
    r.params = {{"p" + text, text}};
    r.quality.more = {{"kept_share." + text, 0.25}};
    const table t = parse_csv(to_csv(std::vector<result>{r, full_row()}));
    REQUIRE(t.size() == 3);
    auto row = row_at(t, 1);
    CHECK(unescape_bytes(row["trace"]) == text);
    CHECK(unescape_bytes(row[escape_bytes("params.p" + text, controls::lines)]) == text);
    CHECK(row[escape_bytes("quality.kept_share." + text, controls::lines)] == "0.25");
  }
}

TEST_CASE("numbers that are not finite are empty and named") {
  result r = full_row();
  r.memory.mean_bytes = std::nan("");
  auto row = row_at(parse_csv(to_csv(std::vector<result>{r})), 1);
  CHECK(row["memory.mean_bytes"].empty());
  CHECK(row["note"] == "a note; memory.mean_bytes was nan");
}

TEST_CASE("detailed files") {
  const row_key key = {"a,b.h5", "window:budget=4", "open", 2};
  const step_row step = {key, 7, 1024.0, 4.5, 0.1, maybe(), std::nan(""), 0.25};
  CHECK(to_csv(std::vector<step_row>{step}) ==
        "trace,policy,mode,sequence,step,bytes,entries,confidence,budget,attention_recall,"
        "output_rel_l2\n\"a,b.h5\",window:budget=4,open,2,7,1024,4.5,0.1,,,0.25\n");
  const head_row head = {key, 1, 0, 4.5, 0.5, maybe(), 0.125};
  CHECK(to_csv(std::vector<head_row>{head}) ==
        "trace,policy,mode,sequence,layer,kv_head,mean_entries,attention_recall,output_rel_l2,"
        "head_l1\n\"a,b.h5\",window:budget=4,open,2,1,0,4.5,0.5,,0.125\n");
  const kept_row kept = {key, 7, 1, 0, {0, 3, 12}};
  CHECK(to_csv(std::vector<kept_row>{kept, {key, 8, 1, 0, {}}}) ==
        "trace,policy,mode,sequence,step,layer,kv_head,positions\n"
        "\"a,b.h5\",window:budget=4,open,2,7,1,0,0 3 12\n"
        "\"a,b.h5\",window:budget=4,open,2,8,1,0,\n");
}
