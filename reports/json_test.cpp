#include "reports/json.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "reports/test_support.hpp"

using namespace kvreplay::reports;
using testing::full_row;
using testing::nasty_texts;

namespace {

result nasty_row(const std::string& text) {
  result r = full_row();
  r.trace = r.trace_fingerprint = r.layers = r.policy = r.name = r.precision = r.note = text;
  r.params = {{"p" + text, text}};
  r.quality.more = {{"kept_share." + text, 0.25}, {"kept_share.z", maybe()}};
  r.quality_ci = {{"kept_share." + text, {0.1, 0.3}}};
  return r;
}

std::string error_of(const std::string& text) {
  try {
    read_json(text, "r.json");
  } catch (const report_error& error) {
    const std::string what = error.what();
    CHECK(what.starts_with("r.json"));
    CHECK(what.find('\n') == std::string::npos);
    return what;
  }
  return "no error";
}

// A valid file with `from` replaced.
std::string edited(const std::string& from, const std::string& to) {
  std::string text = to_json({{}, {full_row()}});
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("a report comes back without a difference, to the last bit") {
  report a;
  a.tool = {"0.1.0", "abc", "cpu", "1.10.8", "", "kvreplay replay a b", "g++ 12", "some cpu", 4};
  a.runs = {full_row(), full_row(1e-300), full_row(1e300), result()};
  const report b = read_json(to_json(a), "r.json");
  CHECK(differences(a, b).empty());
  CHECK(to_json(b) == to_json(a));
  CHECK(b.tool.command == a.tool.command);
  CHECK(b.tool.threads == 4);
  CHECK(b.runs[0].time.wall_s == a.runs[0].time.wall_s);
}

TEST_CASE("bytes that are no text come back, and the file is strict JSON safe in HTML") {
  for (const std::string& text : nasty_texts()) {
    CAPTURE(text);
    report a;
    a.tool.command = text;
    a.runs = {nasty_row(text)};
    const std::string dumped = to_json(a);
    CHECK(nlohmann::json::accept(dumped));
    CHECK(dumped.find_first_of("<>&") == std::string::npos);
    CHECK(dumped.find("\xE2\x80\xA8") == std::string::npos);
    CHECK(dumped.find('\x1b') == std::string::npos);
    const report b = read_json(dumped, "r.json");
    CHECK(differences(a, b).empty());
    CHECK(b.tool.command == text);
    const std::string line = to_json_line(a.runs[0]);
    CHECK(line.find('\n') == std::string::npos);
    CHECK(differences(a, {{}, {read_json_line(line, "j:1")}}).empty());
  }
}

TEST_CASE("keys stand in the order of the schema, and what was not measured is null") {
  result r;
  r.tokens.prompt = 5;
  r.memory.mean_bytes = 0.1;
  const auto all = nlohmann::ordered_json::parse(to_json({{}, {r}}));
  std::vector<std::string> keys;
  for (const auto& [key, value] : all["runs"][0].items()) keys.push_back(key);
  CHECK(keys == std::vector<std::string>{"trace",         "trace_fingerprint",
                                         "sequence",      "layers",
                                         "policy",        "name",
                                         "params",        "precision",
                                         "mode",          "seed",
                                         "status",        "note",
                                         "gap_reference", "tokens",
                                         "memory",        "quality",
                                         "quality_ci",    "confidence",
                                         "events",        "time",
                                         "match",         "sweep"});
  CHECK(all["schema"] == "kvreplay.results/1");
  CHECK(all["runs"][0]["quality"]["ppl"].is_null());
  CHECK(all["runs"][0]["tokens"]["prompt"].dump() == "5");
  CHECK(all["runs"][0]["memory"]["mean_bytes"].dump() == "0.1");
  CHECK(all["runs"][0]["memory"].size() == 12);
}

TEST_CASE("a number that is not finite becomes null with a note") {
  for (const double bad : {std::nan(""), HUGE_VAL, -HUGE_VAL}) {
    result r = full_row();
    r.quality.ppl = bad;
    r.quality_ci["ppl"] = {bad, 1};
    const report back = read_json(to_json({{}, {r}}), "r.json");
    CHECK_FALSE(back.runs[0].quality.ppl.has_value());
    CHECK(back.runs[0].quality_ci.empty());
    CHECK(back.runs[0].note.find("quality.ppl was") != std::string::npos);
  }
}

TEST_CASE("the reader names file and key of what it refuses") {
  CHECK(error_of(edited("results/1", "results/2")).find("schema: is kvreplay.results/2") !=
        std::string::npos);
  CHECK(error_of(edited("\"trace\":", "\"tracé\":")).find("runs[0].trace: is missing") !=
        std::string::npos);
  CHECK(error_of(edited("\"mean_bytes\"", "\"mean_byte\"")).find("runs[0].memory.mean_byte") !=
        std::string::npos);
  CHECK(error_of(edited("\"sequence\": 3", "\"sequence\": 3.5")).find("runs[0].sequence") !=
        std::string::npos);
  CHECK(error_of(edited("\"sequence\": 3", "\"sequence\": -2")).find("runs[0].sequence") !=
        std::string::npos);
  CHECK(error_of(edited("\"sequence\": 3", "\"sequence\": 2147483648")).find("sequence") !=
        std::string::npos);
  CHECK(error_of(edited("\"seed\": -7", "\"seed\": 9223372036854775808")).find("seed") !=
        std::string::npos);
  CHECK(error_of(edited("\"mode\": \"closed\"", "\"mode\": \"ajar\"")).find("runs[0].mode") !=
        std::string::npos);
  CHECK(error_of(edited("\"status\": \"ok\"", "\"status\": 1")).find("runs[0].status") !=
        std::string::npos);
  CHECK(error_of(edited("\"policy_state_bytes\": ", "\"policy_state_bytes\": true,\"x\":"))
            .find("memory.policy_state_bytes: is boolean, expected a number") != std::string::npos);
  CHECK(error_of(edited("\"prompt\": 10", "\"prompt\": 1e1")).find("tokens.prompt") !=
        std::string::npos);
  CHECK(error_of(edited("\"seed\": -7", "\"seed\": -7, \"seed\": -7")).find("twice") !=
        std::string::npos);
  CHECK(error_of(edited("\"ppl\": [", "\"ppl\": [0,")).find("quality_ci.ppl") != std::string::npos);
  CHECK(error_of(edited("\"params\": {", "\"params\": {\"x\": 1,")).find("params.x") !=
        std::string::npos);
  CHECK(error_of(edited("\"seed\": -7", "\"seed\": NaN")).find("is not JSON") != std::string::npos);
  CHECK(error_of(edited("\"sequence\": 3", "\"sequence\": 1e999")).find("is not JSON") !=
        std::string::npos);
  CHECK(error_of(to_json({}) + "x").find("is not JSON") != std::string::npos);
  CHECK(error_of("[]").find("expected an object") != std::string::npos);
  CHECK(error_of("{\"schema\":\"kvreplay.results/1\"}").find("runs: is missing") !=
        std::string::npos);
  CHECK(error_of(std::string(1000000, '[')).find("nested") != std::string::npos);
}

TEST_CASE("every cut of a file is refused, never accepted or crashed on") {
  const std::string text = to_json_line(full_row());
  for (std::size_t n = 0; n < text.size(); ++n) {
    CHECK_THROWS_AS((void)read_json_line(text.substr(0, n), "j:1"), report_error);
  }
}

TEST_CASE("metrics unknown to this version are kept") {
  const report r = read_json(edited("\"ppl\": ", "\"a_new_one\": 0.5, \"ppl\": "), "r.json");
  CHECK(r.runs[0].quality.more.front().name == "a_new_one");
  CHECK(r.runs[0].quality.more.front().value == 0.5);
}
