#include "reports/table.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <sstream>

#include "reports/test_support.hpp"
#include "reports/text.hpp"

using namespace kvreplay::reports;

namespace {

result open_row(const std::string& policy, double entries, double bytes, double recall) {
  result r;
  r.trace = "t.h5";
  r.policy = policy;
  r.precision = "fp16";
  r.memory.mean_entries = entries;
  r.memory.mean_bytes = bytes;
  r.memory.memory_ratio = bytes / 4194304;
  r.quality.attention_recall = recall;
  r.quality.output_rel_l2 = 0.05;
  return r;
}

std::vector<result> small_report() {
  std::vector<result> runs = {
      open_row("full", 2048, 4194304, 1), open_row("window:budget=512", 513, 1050624, 0.5421),
      open_row("confkv:tau=0.6,high=256,low=768,decay=0.97,recency=0.05,mass=log+int8:age=128",
               259.1, 530432.5, 0.90549)};
  result failed;
  failed.trace = "t.h5";
  failed.policy = "trimkv";
  failed.precision = "fp16";
  failed.status = "failed";
  failed.note = "t.h5 has no retention";
  runs.push_back(failed);
  return runs;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

}  // namespace

TEST_CASE("a small report, as it stands on the terminal") {
  table_options options;
  options.width = 92;
  options.footer = {"layers 4/30",
                    "open loop: evicted context does not change later hidden states"};
  const std::string text = to_table(small_report(), options);
  CHECK(text ==
        R"(policy                    precision  entries  bytes [MiB]   ratio  recall  output_rel_l2
----------------------------------------------------------------------------------------
full                      fp16          2048        4.000   1.000   1.000        0.05000
window:budget=512         fp16         513.0        1.002  0.2505  0.5421        0.05000
confkv:tau=0.6,high=256,  fp16         259.1       0.5059  0.1265  0.9055        0.05000
  low=768,decay=0.97,
  recency=0.05,mass=log+
  int8:age=128
trimkv                    fp16
  failed: t.h5 has no retention
layers 4/30
open loop: evicted context does not change later hidden states
)");
  const auto lines = lines_of(text);
  for (const auto& line : lines) {
    CHECK(line.size() <= 92);
    CHECK_FALSE(line.ends_with(' '));
  }
}

TEST_CASE("columns appear where rows fill them or differ in them") {
  auto runs = small_report();
  runs[1].mode = "closed";
  runs[1].quality.ppl = 34.07;
  runs[2].trace = "other.h5";
  runs[2].quality.kl_proxy = 0.125;
  table_options options;
  options.more = {"quality.kl_proxy", "quality.gap_closed"};
  const std::string text = to_table(runs, options);
  const std::string head = lines_of(text)[0];
  for (const char* title : {"trace", "mode", "ppl", "kl_proxy"}) {
    CHECK(head.find(title) != std::string::npos);
  }
  CHECK(head.find("gap_closed") == std::string::npos);
  CHECK(text.find("34.07") != std::string::npos);
}

TEST_CASE("labels replace the resolved policy, and nothing is lost by wrapping") {
  auto runs = small_report();
  table_options options;
  options.labels = {"", "", "mine"};
  CHECK(to_table(runs, options).find("\nmine ") != std::string::npos);
  options.labels.clear();
  for (const std::size_t width : {0u, 20u, 60u, 100u, 400u}) {
    options.width = width;
    std::string joined;
    for (const auto& line : lines_of(to_table(runs, options))) {
      const std::string cell = line.substr(0, line.find("  ", 2));
      joined += cell.substr(std::min(cell.size(), cell.find_first_not_of(' ')));
    }
    CHECK(joined.find(runs[2].policy) != std::string::npos);
  }
}

TEST_CASE("names cannot break the table") {
  for (const std::string& text : testing::nasty_texts()) {
    result r = open_row(text, 1, 2, 0.5);
    r.status = "failed";
    r.note = text;
    table_options options;
    options.footer = {text};
    const std::string out = to_table(std::vector<result>{r}, options);
    CHECK(out.find('\x1b') == std::string::npos);
    CHECK(out.find('\0') == std::string::npos);
    CHECK(escape_bytes(out, controls::lines) == escape_bytes(out, controls::keep));
    CHECK(out.find("failed: ") != std::string::npos);
  }
  CHECK(lines_of(to_table(std::span<const result>())).size() == 2);
  result bad = open_row("x", std::nan(""), HUGE_VAL, 0.5);
  CHECK(to_table(std::vector<result>{bad}).find("inf") == std::string::npos);
}

TEST_CASE("four significant digits") {
  CHECK(four_digits(0) == "0");
  CHECK(four_digits(1) == "1.000");
  CHECK(four_digits(9.99996) == "10.00");
  CHECK(four_digits(9.9994) == "9.999");
  CHECK(four_digits(-12.345) == "-12.35");
  CHECK(four_digits(2048) == "2048");
  CHECK(four_digits(123456.4) == "123456");
  CHECK(four_digits(1234567) == "1.235e+06");
  CHECK(four_digits(0.05) == "0.05000");
  CHECK(four_digits(0.00012346) == "0.0001235");
  CHECK(four_digits(1.23456e-7) == "1.235e-07");
  CHECK(four_digits(5e-324) == "4.941e-324");
}

TEST_CASE("a short name leaves out what is as by default") {
  result r;
  r.name = "confkv";
  r.params = {{"tau", "0.6"}, {"high", "256"}, {"low", "64"}};
  const std::vector<std::pair<std::string, std::string>> defaults = {{"tau", "0.6"},
                                                                     {"high", "128"}};
  CHECK(short_policy(r, defaults) == "confkv:high=256,low=64");
  CHECK(short_policy(r, r.params) == "confkv");
  r.params.push_back({"every.n", "1"});
  r.params.push_back({"int8.window", "64"});
  r.params.push_back({"int8.scales", "token"});
  const std::vector<std::pair<std::string, std::string>> every_step{{"every.n", "1"}};
  CHECK(short_policy(r, every_step).find("+int8:window=64,scales=token") != std::string::npos);
  CHECK(short_policy(r, every_step).find("every") == std::string::npos);
}
