// --config: a file says what the command line would, mistakes in it are one line.
#include <doctest/doctest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "replay/test_program.hpp"
#include "replay/test_support.hpp"
#include "reports/json.hpp"

namespace kvreplay::replay {
namespace {

TEST_CASE("a config file gives the rows of the command line, and the results give that command") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto out = folder / "it's.json", again = folder / "again.json";
  for (const std::string end : {"\n", "\r\n"}) {
    std::ofstream(folder / "c.toml")
        << "[replay]" << end << "traces = [\"" << t << "\"]" << end
        << "policy = [\"window:budget=8\", \"h2o:budget=6\"]" << end << "no-bound = true" << end
        << "output = [\"" << out << "\"]" << end << "[sweep]" << end << "batch-points = 3" << end;
    REQUIRE(run(folder, "replay --config " + (folder / "c.toml")).code == 0);
    const auto report = reports::read_json(slurp(out), out);
    REQUIRE(report.runs.size() == 2);
    CHECK(report.runs[1].name == "h2o");
    CHECK(!report.runs[0].quality.recall_bound.has_value());
    // The command in the file, but for the name of the program, runs as it stands.
    auto command = report.tool.command;
    REQUIRE(command.starts_with("kvreplay "));
    CHECK(command.find("--config") == std::string::npos);
    const auto rerun = run(folder, command.substr(9) + " -o " + again);
    REQUIRE_MESSAGE(rerun.code == 0, rerun.err);
    CHECK(reports::differences(report, reports::read_json(slurp(again), again)).empty());
  }
  // The command line wins.
  REQUIRE(run(folder, "--config " + (folder / "c.toml") + " replay --policy full").code == 0);
  CHECK(reports::read_json(slurp(out), out).runs.size() == 1);
}

TEST_CASE("mistakes in a config file are one line with a hint") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const std::string start = "[replay]\ntraces = [\"" + t + "\"]\npolicy = [\"full\"]\n";
  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"[replay]\ntraces = [\"" + t + "\"]\npolcy = [\"full\"]\n", "did you mean 'policy'"},
      {"[rplay]\npolicy = [\"full\"]\n", "did you mean 'replay'"},
      {start + "skip = 1\nskip = 2\n", "skip"},
      {start + "skip = -1\n", "skip"},
      {start + "skip = 18446744073709551616\n", "skip"},
      {start + "skip = nan\n", "skip"},
      {start + "skip = \n", "skip"},
      {"[replay]\ntraces = [\"" + t + "\"]\npolicy = [\"window:budgt=4\"]\n", "budget"},
      {"garbage ][\n", "TOML"}};
  for (const auto& [text, hint] : wrong) {
    CAPTURE(text);
    std::ofstream(folder / "c.toml") << text;
    const auto refused = run(folder, "replay --config " + (folder / "c.toml"));
    CHECK(refused.code == 2);
    CHECK_MESSAGE(one_line(refused.err), refused.err);
    CHECK_MESSAGE(refused.err.find(hint) != std::string::npos, refused.err);
  }
  const auto absent = run(folder, "replay --config " + (folder / "absent.toml"));
  CHECK(absent.code == 2);
  CHECK(absent.err.find("absent.toml") != std::string::npos);
}

}  // namespace
}  // namespace kvreplay::replay
