#include "reports/html.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "reports/test_support.hpp"
#include "reports/text.hpp"

using namespace kvreplay::reports;
using testing::full_row;
using testing::nasty_texts;

namespace {

std::size_t count(std::string_view text, std::string_view what) {
  std::size_t n = 0;
  for (std::size_t at = text.find(what); at != text.npos; at = text.find(what, at + 1)) ++n;
  return n;
}

// What a browser hands to JSON.parse: all up to the next "</script", whatever stands in it.
std::string data_of(const std::string& page) {
  const std::size_t element = page.find("<script type=\"application/json\" id=\"data\"");
  REQUIRE(element != std::string::npos);
  const std::size_t begin = page.find('>', element) + 1;
  return page.substr(begin, page.find("</script", begin) - begin);
}

std::string page_of(const std::vector<result>& rows) {
  const report one{{"0.1.0", "abc", "cpu", "1.10", "", "kvreplay replay", "g++", "a cpu", 2}, rows};
  return to_html({&one, 1}, std::vector<std::string>(rows.size(), "a label"));
}

}  // namespace

TEST_SUITE_BEGIN("html" * doctest::skip(!page_unavailable().empty()));

TEST_CASE("the page holds the rows by column, and the same rows give the same page") {
  result second = full_row(2);
  second.quality.ppl.reset();
  second.details = row_details{};
  second.details->series["bytes"] = {{1, 2}, {3, 4}};
  const std::string page = page_of({full_row(), second});
  CHECK(page == page_of({full_row(), second}));
  const auto data = nlohmann::json::parse(data_of(page));
  CHECK(data["count"] == 2);
  CHECK(data["labels"][1] == "a label");
  CHECK(data["numbers"]["quality.ppl"][0].get<double>() ==
        doctest::Approx(*full_row().quality.ppl).epsilon(1e-6));
  CHECK(data["numbers"]["quality.ppl"][1].is_null());
  CHECK(data["numbers"]["quality.kept_share.needle"].size() == 2);
  CHECK(data["texts"]["policy"]["values"][data["texts"]["policy"]["index"][1].get<int>()] ==
        full_row().policy);
  CHECK(data["intervals"]["ppl"]["low"][0].get<double>() == doctest::Approx(1.0 / 3));
  CHECK(data["details"]["1"]["series"]["bytes"]["value"][1] == 4);
  CHECK(data["files"][0]["command"] == "kvreplay replay");
  CHECK(page.find("Permission is hereby granted") != std::string::npos);
  CHECK(count(page, "http://") == 0);
  CHECK(page.find("default-src 'none'") != std::string::npos);
}

TEST_CASE("no name can end its element, open another or touch the frame") {
  const std::string plain = page_of({full_row()});
  auto texts = nasty_texts();
  texts.insert(texts.end(),
               {"<!--<script>", "{{script}}", "{{nonce}}", "]]>", "\" onload=alert(1) x=\"",
                "<img src=x onerror=alert(1)>", "javascript:alert(1)"});
  for (const std::string& text : texts) {
    CAPTURE(text);
    result row = full_row();
    row.trace = row.trace_fingerprint = row.policy = row.name = row.precision = row.note = text;
    row.layers = row.mode = text;
    row.quality.more = {{"kept_share." + text, 0.5}};
    row.quality_ci = {{text, {0.1, 0.2}}};
    report hostile;
    hostile.tool.command = hostile.tool.cpu = text;
    hostile.runs = {row};
    const std::string page = to_html({&hostile, 1}, std::vector<std::string>{text});
    CHECK(count(page, "<script") == count(plain, "<script"));
    CHECK(count(page, "</script") == count(plain, "</script"));
    CHECK(count(page, "<!--") == count(plain, "<!--"));
    CHECK(count(page, "<img") == 0);
    const std::string data = data_of(page);
    CHECK(data.find_first_of("<>&") == std::string::npos);
    const auto parsed = nlohmann::json::parse(data);
    const std::string shown = escape_bytes(text, controls::none);
    CHECK(parsed["labels"][0] == shown);
    CHECK(parsed["texts"]["note"]["values"][0] == shown);
    CHECK(parsed["files"][0]["command"] == shown);
    CHECK(parsed["numbers"].contains("quality." +
                                     escape_bytes("kept_share." + text, controls::none)));
    CHECK(std::none_of(data.begin(), data.end(), [](unsigned char c) { return c < 0x20; }));
  }
}

TEST_CASE("the data cannot name the nonce that scripts need") {
  const std::string page = page_of({full_row()}), other = page_of({full_row(2)});
  const auto nonce = [](const std::string& p) {
    const std::size_t at = p.find("<style nonce=\"") + 14;
    return p.substr(at, p.find('"', at) - at);
  };
  CHECK(nonce(page) != nonce(other));
  CHECK(data_of(page).find(nonce(page)) == std::string::npos);
}

TEST_CASE("ten thousand rows stay a few megabytes; no row at all is a page too") {
  std::vector<result> rows;
  for (int i = 0; i < 10000; ++i) rows.push_back(full_row(1 + i * 1e-3));
  row_details details;
  details.series["bytes"] = {{1, 2}, {3, 4}};
  for (auto& row : rows) row.details = details;
  const std::string page = page_of(rows);
  CHECK(page.size() < std::size_t{12} << 20);
  CHECK(nlohmann::json::parse(data_of(page))["details"].size() <= 2 * detailed_rows);
  CHECK(nlohmann::json::parse(data_of(page_of({})))["count"] == 0);
}

TEST_CASE("numbers that are none and labels that miss a row are refused or emptied") {
  result row = full_row();
  row.quality.ppl = HUGE_VAL;
  const auto data = nlohmann::json::parse(data_of(page_of({row})));
  CHECK_FALSE(data["numbers"].contains("quality.ppl"));
  CHECK(data["texts"]["note"]["values"][0].get<std::string>().find("ppl was inf") !=
        std::string::npos);
  const report one{{}, {row}};
  CHECK_THROWS_AS((void)to_html({&one, 1}, {}), report_error);
}

TEST_SUITE_END();
