// kvreplay time: what it must say whatever the clock says.
#include "replay/timing.hpp"

#include <doctest/doctest.h>

#include <vector>

#include "policies/policy.hpp"
#include "replay/open_loop.hpp"
#include "replay/test_support.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

TEST_CASE("a device is timed over all layers and copies, and what it lacks is a failed row") {
  temporary_folder folder;
  auto small = options_for(trace_kind::windowed, 40);
  small.tokens = 46;
  traces::synth(folder / "t.h5", small);
  const traces::reader trace(folder / "t.h5");
  const std::vector<policies::policy> policies = {
      policies::parse_policy("tova:budget=12+int8:window=4"),
      policies::parse_policy("full+int8:scales=channel")};
  const auto device = kernels::open_emulated_device();
  timing_options options;
  options.batch = {1, 2};
  options.repeat = 1;
  options.device = device.get();
  const auto rows = time_policies(trace, 0, policies, options);
  REQUIRE(rows.size() == 4);
  const auto open = replay_open(trace, 0, policies, {});
  for (size_t i = 0; i < 2; ++i) {
    const auto& row = rows[i];
    REQUIRE_MESSAGE(row.status == "ok", row.note);
    CHECK(*row.memory.mean_entries == doctest::Approx(*open[0].row.memory.mean_entries));
    CHECK(*row.memory.mean_bytes == doctest::Approx(*open[0].row.memory.mean_bytes));
    CHECK(*row.time.samples >= 30);
    CHECK(*row.time.append_us_p50 > 0);
    CHECK(*row.time.attend_us_p50 > 0);
    CHECK(*row.time.select_us_p99 > 0);
    CHECK(*row.time.copy_bytes_per_s > 0);
    CHECK_FALSE(row.time.age_us_p50.has_value());
    CHECK(row.note.find("append includes age") != std::string::npos);
  }
  CHECK(rows[2].status == "failed");
  CHECK(rows[2].note.find("not timed on the CPU") != std::string::npos);
}

TEST_CASE("times come with the lengths and bytes of the open loop") {
  temporary_folder folder;
  traces::synth(folder / "t.h5", options_for(trace_kind::grouped, 40));
  const traces::reader trace(folder / "t.h5");
  const std::vector<policies::policy> policies = {
      policies::parse_policy("full"), policies::parse_policy("window:budget=8"),
      policies::parse_policy("confkv:high=8,low=20,recent=4+int8:window=4")};
  timing_options options;
  options.batch = {1, 3};
  options.repeat = 1;
  std::int64_t layers = 0;
  options.progress = [&](std::int64_t done, std::int64_t) { layers = done; };
  const auto rows = time_policies(trace, 0, policies, options);
  REQUIRE(rows.size() == 6);
  CHECK(layers == std::ssize(trace.model().layers));
  const auto open = replay_open(trace, 0, policies, {});
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    REQUIRE_MESSAGE(row.status == "ok", row.note);
    const auto& same = open[i / 2].row;
    CHECK(row.policy == same.policy);
    CHECK(row.mode == "time");
    CHECK(*row.time.batch == options.batch[i % 2]);
    CHECK(*row.memory.mean_entries == doctest::Approx(*same.memory.mean_entries));
    CHECK(*row.memory.mean_bytes == doctest::Approx(*same.memory.mean_bytes));
    CHECK(*row.time.samples >= 30);
    CHECK(*row.time.step_us_p50 > 0);
    CHECK(*row.time.step_us_p99 >= *row.time.step_us_p50);
    CHECK(*row.time.attend_us_p50 > 0);
    CHECK(*row.time.attend_bytes_per_s > 0);
    CHECK(*row.time.copy_bytes_per_s > 0);
    CHECK(*row.time.speedup > 0);
    CHECK(*row.time.short_launch_share >= 0);
    CHECK(*row.time.short_launch_share <= 1);
  }
}

TEST_CASE("a policy that the trace cannot serve is a failed row beside the others") {
  temporary_folder folder;
  auto with = options_for(trace_kind::grouped, 20);
  with.logits = false;
  traces::synth(folder / "t.h5", with);
  const traces::reader trace(folder / "t.h5");
  const std::vector<policies::policy> policies = {policies::parse_policy("confkv:temperature=2"),
                                                  policies::parse_policy("window:budget=4")};
  const auto rows = time_policies(trace, 0, policies, {});
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].status == "failed");
  CHECK(rows[0].note.find("logits") != std::string::npos);
  CHECK(rows[1].status == "ok");
}

}  // namespace
}  // namespace kvreplay::replay
