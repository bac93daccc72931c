#include "replay/tune.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cmath>
#include <map>
#include <vector>

#include "policies/policy.hpp"
#include "replay/sweep.hpp"
#include "replay/test_program.hpp"
#include "replay/test_support.hpp"
#include "reports/json.hpp"

namespace kvreplay::replay {
namespace {

// A made-up world: bytes grow with the budgets, the error has its least at high=200, low=640,
// tau=0.65 and along the way. Counts what it is asked.
struct known_world {
  std::int64_t asked = 0, in_part = 0;
  std::vector<reports::result> operator()(std::span<const std::string> specs, double share) {
    std::vector<reports::result> out;
    for (const auto& spec : specs) {
      ++asked;
      if (share < 1) ++in_part;
      const auto policy = policies::parse_policy(spec);
      const auto& gate = policy.budget.gate;
      reports::result row;
      row.policy = spec;
      row.memory.mean_bytes = gate.high.value + 0.3 * gate.low.value;
      row.memory.memory_ratio = *row.memory.mean_bytes / 1000;
      const double error = std::pow((gate.high.value - 200) / 100, 2) +
                           std::pow((gate.low.value - 640) / 300, 2) +
                           std::pow((gate.tau - 0.65) / 0.2, 2);
      row.quality.residual_rel_l2 = 0.1 + error + (share < 1 ? 0.02 : 0);
      row.quality.attention_recall = 1 / (1 + error);
      out.push_back(row);
    }
    return out;
  }
};

const policies::spec_grid big("confkv:tau=0.3..0.9..0.05,high=104..296..16,low=320..960..64");

TEST_CASE("a known optimum is found, with or without the limit in the way") {
  REQUIRE(big.size() == 13 * 13 * 11);
  for (const double limit : {1e9, 392.0, 330.0}) {
    CAPTURE(limit);
    const tune_goal goal{tune_limit::max_bytes, limit, "residual_rel_l2"};
    known_world world;
    const auto found = tune({&big, 1}, goal, {}, std::ref(world));
    CHECK(found.evaluations == world.asked);
    CHECK(world.asked <= 100);
    CHECK(world.in_part > 0);
    CHECK(found.points == big.size());
    REQUIRE(!found.rows.empty());
    known_world all;
    double best = INFINITY;
    for (std::int64_t i = 0; i < big.size(); ++i) {
      const auto row = all(std::vector{big.spec(i)}, 1).front();
      if (*row.memory.mean_bytes <= limit) best = std::min(best, *row.quality.residual_rel_l2);
    }
    const auto& winner = found.rows.front();
    CHECK(*winner.memory.mean_bytes <= limit);
    CHECK(*winner.quality.residual_rel_l2 <= best * 1.02);
    for (size_t i = 1; i < found.rows.size(); ++i) {
      CHECK_FALSE(better(goal, found.rows[i], found.rows[i - 1]));
    }
  }
}

TEST_CASE("under a limit on quality the fewest bytes win; a small grid is run whole") {
  const tune_goal goal{tune_limit::min_recall, 0.5, ""};
  const policies::spec_grid small("confkv:high=128..256..32,low=640/768");
  known_world world;
  const auto found = tune({&small, 1}, goal, {}, std::ref(world));
  CHECK(world.asked == 10);
  CHECK(world.in_part == 0);
  double least = INFINITY;
  for (const auto& row : found.rows) {
    if (*row.quality.attention_recall >= 0.5) least = std::min(least, *row.memory.mean_bytes);
  }
  CHECK(*found.rows.front().memory.mean_bytes == least);
  CHECK(*found.rows.front().quality.attention_recall >= 0.5);
}

TEST_CASE("several grids share the evaluations, failed points lose, few evaluations suffice") {
  const std::vector<policies::spec_grid> grids = {
      policies::spec_grid("confkv:high=40..296..8,low=320..960..32"), big};
  const tune_goal goal{tune_limit::max_ratio, 0.4, "residual_rel_l2"};
  for (const std::int64_t most : {1, 7, 60}) {
    known_world world;
    const auto found = tune(grids, goal, {.evaluations = most, .batch = 5},
                            [&](std::span<const std::string> specs, double share) {
                              std::vector<reports::result> rows;
                              for (const auto& spec : specs) {
                                try {
                                  rows.push_back(world(std::vector{spec}, share).front());
                                } catch (const policies::spec_error&) {
                                  rows.emplace_back();
                                  rows.back().status = "failed";
                                }
                              }
                              return rows;
                            });
    CHECK(found.evaluations <= most);
    if (most == 60) CHECK(found.rows.front().status == "ok");
  }
}

TEST_CASE("the program prints a SPEC that can be pasted, and holdout rows") {
  temporary_folder folder;
  const auto t = small_trace(folder, "--tokens 160 --prompt-length 60");
  const auto held = folder / "held.h5", out = folder / "tuned.json";
  REQUIRE(run(folder, "synth -o " + held + " --layers 2 --tokens 160 --prompt-length 60 --seed 9")
              .code == 0);
  const auto done = run(folder, "tune " + t +
                                    " -p h2o:budget=8..64..4 -p window:budget=8..64..4 "
                                    "--max-ratio 0.3 --evaluations 20 --holdout " +
                                    held + " -o " + out);
  REQUIRE_MESSAGE(done.code == 0, done.err);
  const auto report = reports::read_json(slurp(out), out);
  REQUIRE(!report.runs.empty());
  CHECK(*report.runs[0].memory.memory_ratio <= 0.3);
  CHECK(done.out.find(report.runs[0].policy) != std::string::npos);
  CHECK(done.out.find("held.h5") != std::string::npos);
  const auto hopeless = run(folder, "tune " + t + " -p h2o:budget=8..64..4 --max-bytes 10");
  CHECK(hopeless.code == 1);
  CHECK(hopeless.err.find("nearest") != std::string::npos);
  for (const std::string wrong : {"-p full", "-p full --max-ratio 0.1 --min-recall 0.2",
                                  "-p full --max-bytes -1", "-p full --max-kl 0.1"}) {
    CAPTURE(wrong);
    const auto refused = run(folder, "tune " + t + " " + wrong);
    CHECK(refused.code == 2);
    CHECK_MESSAGE(one_line(refused.err), refused.err);
  }
}

}  // namespace
}  // namespace kvreplay::replay
