// Sweeps: the rows of separate runs, whatever the batches, ranks and interruptions.
#include "replay/sweep.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <thread>
#include <vector>

#include "replay/open_loop.hpp"
#include "replay/test_program.hpp"
#include "replay/test_support.hpp"
#include "reports/json.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

const std::vector<std::string> grids = {"window:budget=4..24..4",
                                        "confkv:high=8/70,low=20/30,recent=16", "h2o:budget=12",
                                        "window:budget=8"};

TEST_CASE("a sweep's rows are those of separate runs, for any batch") {
  temporary_folder folder;
  auto options = options_for(trace_kind::grouped, 5);
  options.sequences = 2;
  traces::synth(folder / "t.h5", options);
  std::int64_t repeated = 0;
  const auto points = sweep_points(grids, repeated);
  CHECK(repeated == 1);  // window:budget=8 is in the first grid
  REQUIRE(points.size() == 11);
  const std::vector<std::string> paths = {folder / "t.h5"};
  const traces::reader trace(paths[0]);
  std::vector<reports::result> expected;
  for (const int sequence : {0, 1}) {
    for (const auto& point : points) {
      if (!point.policy) {
        expected.emplace_back();
        continue;
      }
      expected.push_back(replay_open(trace, sequence, {&*point.policy, 1}, {})[0].row);
    }
  }
  for (const std::int64_t batch : {1, 4, 100}) {
    CAPTURE(batch);
    sweep_options sweeping;
    sweeping.batch_points = batch;
    std::int64_t done = 0;
    sweeping.finished = [&](const reports::result&) { ++done; };
    const auto rows = sweep(paths, points, sweeping);
    REQUIRE(rows.size() == 22);
    std::int64_t failed = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (!points[i % 11].policy) {
        ++failed;
        CHECK(rows[i].status == "failed");
        CHECK(rows[i].note.find("recent") != std::string::npos);
        CHECK(rows[i].policy == points[i % 11].spec);
        continue;
      }
      const auto different = reports::differences({{}, {expected[i]}}, {{}, {rows[i]}});
      CHECK_MESSAGE(different.empty(), different.front());
    }
    CHECK(failed == 4);  // high below recent, on two sequences
    CHECK(done == 18);
  }
}

TEST_CASE("known rows are not run again, unreadable traces are rows") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::one_layer, 6));
  std::int64_t repeated = 0;
  const auto points = sweep_points({{"window:budget=4..12..4"}}, repeated);
  const std::vector<std::string> paths = {folder / "absent.h5", folder / "t.h5"};
  sweep_options options;
  const auto rows = sweep(paths, points, options);
  REQUIRE(rows.size() == 6);
  CHECK(rows[0].status == "failed");
  CHECK(rows[0].note.find("absent.h5") != std::string::npos);
  CHECK(rows[3].status == "ok");
  options.known = {rows[4], rows[0]};
  std::vector<std::string> run;
  options.finished = [&](const reports::result& row) { run.push_back(row.policy); };
  const auto again = sweep(paths, points, options);
  CHECK(run == std::vector<std::string>{rows[3].policy, rows[5].policy});
  CHECK(reports::differences({{}, rows}, {{}, again}).empty());
  options.open.bound = false;  // other columns: the known row no longer serves
  run.clear();
  sweep(paths, points, options);
  CHECK(run.size() == 3);
  CHECK_THROWS_AS(sweep({paths.data(), 1}, points, {}), traces::trace_error);
}

TEST_CASE("shards part the points and nothing else") {
  std::int64_t repeated = 0;
  const auto points = sweep_points(grids, repeated);
  size_t taken = 0;
  for (int i = 0; i < 4; ++i) taken += take_shard(points, i, 4).size();
  CHECK(taken == points.size());
  CHECK(take_shard(points, 1, 4)[1].spec == points[5].spec);
  CHECK(take_shard(points, 30, 40).empty());
}

TEST_CASE("the program marks the front and says what it did") {
  temporary_folder folder;
  const auto t = small_trace(folder);
  const auto out = folder / "s.json";
  const auto done =
      run(folder, "sweep " + t + " -p window:budget=4..16..4 -p h2o:budget=8 -o " + out);
  REQUIRE_MESSAGE(done.code == 0, done.err);
  CHECK(done.err.find("5 points on 1 trace") != std::string::npos);
  CHECK(done.out.find("h2o") != std::string::npos);
  const auto report = reports::read_json(slurp(out), out);
  REQUIRE(report.runs.size() == 5);
  for (const auto& row : report.runs) CHECK(row.pareto.has_value());
  CHECK(slurp(out + ".journal").empty());
  const auto corner = run(folder, "sweep " + t + " -p confkv:high=8/64,low=70,recent=16");
  CHECK(corner.code == 1);
  CHECK(corner.out.find("never evicted") != std::string::npos);
  for (const std::string wrong :
       {"-p window:budget=8..4..1", "-p window:budget=4/4", "-p window:budget=4 --shard 3/2",
        "-p window:budget=4 --shard 1", "-p window:budget=4 --resume",
        "-p window:budget=4 -o a.txt", "-p confkv:high=8/9,recent=16"}) {
    CAPTURE(wrong);
    const auto refused = run(folder, "sweep " + t + " --quiet " + wrong);
    CHECK(refused.code == 2);
    CHECK_MESSAGE(one_line(refused.err), refused.err);
  }
}

TEST_CASE("a sweep killed in the middle resumes to the rows of an undisturbed one") {
  temporary_folder folder;
  const auto t = small_trace(folder, "--tokens 600 --prompt-length 40");
  const auto out = folder / "s.json", whole = folder / "w.json";
  const std::string grid =
      "sweep " + t + " -p h2o:budget=8..40..1 --batch-points 2 --threads 1 -o ";
  REQUIRE(run(folder, grid + whole).code == 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto command =
        std::string("exec ") + KVREPLAY_PROGRAM + " " + grid + out + " >/dev/null 2>&1";
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  // Killed as soon as a few rows are in the journal; a machine that gets them all in no time still
  // leaves a file to resume from.
  for (int i = 0; i < 20000; ++i) {
    const auto journal = slurp(out + ".journal");
    if (std::count(journal.begin(), journal.end(), '\n') >= 3 || std::filesystem::exists(out))
      break;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  const bool killed = WIFSIGNALED(status);
  if (killed) CHECK(!std::filesystem::exists(out));
  const auto resumed = run(folder, grid + out + " --resume");
  REQUIRE_MESSAGE(resumed.code == 0, resumed.err);
  const auto different = reports::differences(reports::read_json(slurp(whole), whole),
                                              reports::read_json(slurp(out), out));
  CHECK_MESSAGE(different.empty(), different.front());
}

}  // namespace
}  // namespace kvreplay::replay
