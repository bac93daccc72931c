// device_lane: a lane whose entries live on a device. The lane's own cache then holds positions and
// no keys or values, as an index: S(t) while a step is observed, the kept set after it. Counts,
// bytes and everything that reads positions work on it as on the host.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kernels/device_cache.hpp"
#include "replay/replay_layer.hpp"

namespace kvreplay::replay {

// Why this policy runs on the host although there is a device, as a sentence for the row's note;
// empty: the device can run it. What is not known here is the host's.
std::string host_reason(const policies::policy& policy, const kernels::cache_shape& shape);

// The part of a block that one layer has.
struct device_block {
  int slot = 0;
  layer_block block;
  std::span<step_events> events;  // [steps]; times stay 0
  step_observer observe;          // these may be empty; distinct layers' are called by
  kept_observer kept;             // distinct threads
};

class device_lane {
 public:
  // `host` must outlive it. Throws std::invalid_argument where host_reason is not empty.
  device_lane(lane& host, kernels::compute_device& device);

  // Once the slot's prompt is loaded and selected on the host: its entries move to the device.
  void load(int slot);

  // replay_layer for several layers over the same steps: one sequence of launches for all of them.
  // `positions`: the lane's cache follows S(t) exactly; else only its counts do.
  void replay(std::span<const device_block> blocks, bool positions);

  // After the last block: the entries come back, aged as after `last_step`.
  void finish(int slot, std::int64_t last_step);

  // As device_cache's.
  void time_kernels(kernels::kernel_clock clock) { cache_->time_kernels(std::move(clock)); }
  void synchronise() { cache_->synchronise(); }
  std::int64_t reserved_bytes() const { return cache_->reserved_bytes(); }

 private:
  void step(std::span<const device_block> blocks, std::int64_t i, bool positions);
  void calibrate(int slot, std::int64_t step);
  void follow(int slot, bool positions);
  void settle(std::span<const device_block> blocks, std::int64_t i);
  void forget_payload(int slot);
  std::span<kernels::head_store> heads(int slot);

  lane* lane_;
  std::unique_ptr<kernels::device_cache> cache_;
};

}  // namespace kvreplay::replay
