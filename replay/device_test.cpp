// The open loop on a device (here the emulated one) beside the host's: the same rows.
#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "policies/policy.hpp"
#include "replay/device_lane.hpp"
#include "replay/open_loop.hpp"
#include "replay/test_support.hpp"
#include "reports/result.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

std::vector<lane_output> run(const traces::reader& trace, const std::vector<std::string>& specs,
                             kernels::compute_device* device, std::int64_t block = 128,
                             std::int64_t steps = 0) {
  std::vector<policies::policy> policies;
  for (const auto& spec : specs) policies.push_back(policies::parse_policy(spec));
  open_loop_options options;
  options.kept = options.per_step = options.per_head = true;
  options.block = block;
  options.steps = steps;
  options.device = device;
  return replay_open(trace, 0, policies, options);
}

void check_near(const reports::maybe& a, const reports::maybe& b, double tolerance) {
  REQUIRE(a.has_value() == b.has_value());
  if (a) CHECK(std::fabs(*a - *b) <= tolerance * (1 + std::fabs(*b)));
}

void check_same(const lane_output& device, const lane_output& host) {
  const auto& a = device.row;
  const auto& b = host.row;
  REQUIRE_MESSAGE(a.status == "ok", a.note);
  CHECK(a.note.find("on the device") != std::string::npos);
  CHECK_FALSE(a.time.attend_us_p50.has_value());
  CHECK(a.memory.mean_bytes == b.memory.mean_bytes);
  CHECK(a.memory.peak_bytes == b.memory.peak_bytes);
  CHECK(a.memory.final_bytes == b.memory.final_bytes);
  CHECK(a.memory.mean_entries == b.memory.mean_entries);
  CHECK(a.memory.policy_state_bytes == b.memory.policy_state_bytes);
  CHECK(a.events.evicted == b.events.evicted);
  CHECK(a.events.quantised == b.events.quantised);
  CHECK(a.events.kept_turnover == b.events.kept_turnover);
  CHECK(device.dropped == host.dropped);
  check_near(a.quality.attention_recall, b.quality.attention_recall, 1e-5);
  check_near(a.quality.recall_bound, b.quality.recall_bound, 1e-9);
  check_near(a.quality.output_rel_l2, b.quality.output_rel_l2, 5e-4);
  REQUIRE(device.steps.size() == host.steps.size());
  for (size_t i = 0; i < host.steps.size(); ++i) {
    CHECK(device.steps[i].bytes == host.steps[i].bytes);
    CHECK(device.steps[i].budget == host.steps[i].budget);
    check_near(device.steps[i].output_rel_l2, host.steps[i].output_rel_l2, 5e-4);
  }
}

TEST_CASE("rows of the device are the host's on every golden trace") {
  const auto device = kernels::open_emulated_device();
  const std::string confkv = "confkv:high=8,low=20,recent=4,shrink=2";
  const std::string tova = "tova:budget=12+int8:window=6", random = "random:budget=12,recent=2";
  const std::string h2o = "h2o:budget=12+int8:window=6,scales=token";
  const std::vector<std::pair<const char*, std::vector<std::string>>> runs{
      {"plain.h5", {confkv}},
      {"grouped7.h5", {random, "h2o:budget=25%,gqa=max+every:n=4"}},
      {"windowed.h5", {tova, h2o}},
      {"sinks.h5",
       {confkv, tova, random, h2o, "full+int8:window=8", "window:budget=12", "streaming:budget=12",
        "confkv-l:high=8,low=20,recent=2,mass=max,tau=q0.5+int8:window=6"}}};
  for (const auto& [name, specs] : runs) {
    CAPTURE(name);
    const traces::reader trace(testdata("traces", name));
    const auto host = run(trace, specs, nullptr);
    const auto there = run(trace, specs, device.get(), 7);
    for (size_t i = 0; i < specs.size(); ++i) {
      CAPTURE(specs[i]);
      check_same(there[i], host[i]);
    }
  }
}

TEST_CASE("a real model on the tensor cores: the host's rows") {
  const auto device = kernels::open_emulated_device();
  const traces::reader trace(std::string(KVREPLAY_SOURCE_DIR) + "/traces/samples/smollm2-64.h5");
  const std::vector<std::string> specs{"tova:budget=24+int8:window=8"};
  check_same(run(trace, specs, device.get(), 8, 12)[0], run(trace, specs, nullptr, 8, 12)[0]);
}

TEST_CASE("a device gives the same bits again, for any block, and beside lanes of the host") {
  const auto device = kernels::open_emulated_device();
  const traces::reader trace(testdata("traces", "sinks.h5"));
  const std::string h2o = "h2o:budget=12+int8:window=6", paged = h2o + "+paged:page=16";
  const auto both = run(trace, {paged, h2o}, device.get());
  const auto alone = run(trace, {h2o}, device.get(), 5);
  CHECK(both[1].dropped == alone[0].dropped);
  CHECK(both[1].row.quality.output_rel_l2 == alone[0].row.quality.output_rel_l2);
  CHECK(both[1].row.quality.attention_recall == alone[0].row.quality.attention_recall);
  CHECK(both[0].row.status == "ok");
  CHECK(both[0].row.note.find("on the CPU: the device kernels have no paged") != std::string::npos);
}

TEST_CASE("a short prompt: channel scales come from the first ageing, as on the host") {
  temporary_folder folder;
  const auto device = kernels::open_emulated_device();
  for (const auto kind : {trace_kind::grouped, trace_kind::one_token_prompt}) {
    auto synthetic = options_for(kind, 3);
    synthetic.layers = 1;
    traces::synth(folder / "t.h5", synthetic);
    const traces::reader trace(folder / "t.h5");
    const std::vector<std::string> specs{"h2o:budget=12+int8:window=6", "full+int8:window=50",
                                         "window:budget=9+int8:window=2,sinks=3"};
    const auto host = run(trace, specs, nullptr), there = run(trace, specs, device.get());
    for (size_t i = 0; i < specs.size(); ++i) {
      CAPTURE(specs[i]);
      check_same(there[i], host[i]);
    }
  }
}

// A device that has no room.
class full_device : public kernels::compute_device {
 public:
  std::string name() const override { return "full"; }
  void flush_caches() override {}
  double copy_bandwidth(std::int64_t) override { return 1; }
  std::unique_ptr<kernels::device_cache> make_cache(const kernels::cache_shape&,
                                                    const kernels::storage_format&,
                                                    const kernels::device_rules&) override {
    throw std::runtime_error("the cache of a layer needs 20 MiB, the device has 3 MiB free");
  }
};

TEST_CASE("a lane that the device has no room for is a failed row beside the others") {
  full_device device;
  const traces::reader trace(testdata("traces", "sinks.h5"));
  const auto rows = run(trace, {"window:budget=12", "window:budget=12+paged:page=16"}, &device);
  CHECK(rows[0].row.status == "failed");
  CHECK(rows[0].row.note.find("the device has 3 MiB free") != std::string::npos);
  CHECK(rows[1].row.status == "ok");
}

TEST_CASE("bytes alone are the host's too") {
  const auto device = kernels::open_emulated_device();
  const traces::reader trace(testdata("traces", "sinks.h5"));
  const std::vector policies{policies::parse_policy("tova:budget=12+int8:window=6")};
  open_loop_options options;
  options.quality = false;
  const auto host = replay_open(trace, 0, policies, options);
  options.device = device.get();
  const auto there = replay_open(trace, 0, policies, options);
  CHECK(there[0].row.memory.mean_bytes == host[0].row.memory.mean_bytes);
  CHECK(there[0].row.memory.final_bytes == host[0].row.memory.final_bytes);
  CHECK(there[0].row.events.evicted == host[0].row.events.evicted);
}

TEST_CASE("what a device cannot run is named") {
  const kernels::cache_shape shape = {.layers = 1,
                                      .q_heads = 2,
                                      .kv_heads = 1,
                                      .head_dim = 8,
                                      .value_dim = 8,
                                      .window = {},
                                      .sink_logits = {}};
  const auto reason = [&](const char* spec) {
    return host_reason(policies::parse_policy(spec), shape);
  };
  CHECK(reason("h2o:budget=4+every:n=2+int8").empty());
  CHECK(reason("full+int8:scales=channel") ==
        "on the CPU: the device kernels have no scales per channel or group");
  auto unknown = policies::parse_policy("full");
  unknown.resolved = "full+novel:x=1";
  CHECK(host_reason(unknown, shape) == "on the CPU: the device kernels have no novel");
}

}  // namespace
}  // namespace kvreplay::replay
