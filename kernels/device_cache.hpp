// device_cache: the entries of several layers on a device, and the steps that run over them there.
// Plain C++; what stands behind it is one source (device_cache_steps.cuh) compiled by nvcc for the
// program (device_cache_cuda.cu) and by the host compiler over the emulator for tests
// (simt/device_cache_emulated.cc).
//
// Entries, scores and what is kept never leave the device: a step brings back o, lse, the number of
// entries and, when asked, their positions. A step follows the host's operations in its order:
//   attend   the layer's window passes, the newcomer enters, entries age as after step t - 1,
//            attention, scores
//   select   the budget's selection after step t
// so that ageing after step t happens at the head of step t + 1, before anything reads it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attend.hpp"
#include "kernels/kv_cache.hpp"
#include "kernels/select.hpp"
#include "kernels/update_scores.hpp"

namespace kvreplay::kernels {

// What a policy does to scores and how it ranks, for all layers of a cache.
struct device_rules {
  mass_layout mass = mass_layout::none;
  score_rule update = score_rule::none;
  float decay = 0;
  rank_rule rank = rank_rule::position;
  float recency = 0;
  std::uint64_t seed = 0;
  bool one_set = false;  // the KV heads of a layer hold the same entries (mass layer_mean)
};

// One layer at one step. Host memory throughout; layers are the cache's.
struct device_step {
  int layer = 0;
  std::int32_t position = 0;  // the same in all items of a call
  const float* q = nullptr;   // [q_heads, head_dim]
  const float* k = nullptr;   // [kv_heads, head_dim]
  const float* v = nullptr;   // [kv_heads, value_dim]
  float* o = nullptr;         // [q_heads, value_dim], filled
  float* lse = nullptr;       // [q_heads], filled
};

// The selection of one layer after the step that `attend` ran last.
struct device_selection {
  int layer = 0;
  int model_layer = 0;          // enters the hash
  const int* budget = nullptr;  // [kv_heads], at least 1
  int sinks = 0, recent = 0;    // as in select_item
};

struct head_counts {
  int body = 0, tail = 0;
  int size() const { return body + tail; }
};

// Told the name of every kernel and the microseconds it took, in the order of the stream.
using kernel_clock = std::function<void(std::string_view kernel, double microseconds)>;

// The cache of one policy. One thread at a time; distinct caches run beside each other. Bits do not
// depend on how layers are gathered into calls.
//
// Errors are the host's: std::invalid_argument for a newcomer that cannot be stored, and
// std::domain_error for a row that cannot be quantised or a score or mass that is NaN, naming
// layer, head and position; seen when the results of a step are read. std::runtime_error
// (simt::failure) where the device has no room, naming what is needed and what is free, or fails.
class device_cache {
 public:
  virtual ~device_cache() = default;

  // Replaces what a layer holds. heads [kv_heads], with FP16 tails.
  virtual void load(int layer, std::span<const head_store> heads) = 0;
  // What a layer holds, scores and slot order included; ages nothing.
  virtual void save(int layer, std::span<head_store> heads) = 0;

  // Runs the step for these layers, each at most once, and waits for the results.
  virtual void attend(std::span<const device_step> items, bool want_positions) = 0;
  // Selection and compaction of these layers. Returns at once; returns the number of entries that
  // leave, over items and heads.
  virtual std::int64_t select(std::span<const device_selection> items) = 0;

  // S(t): what a head held while the last `attend` of its layer ran.
  virtual head_counts counts(int layer, int kv_head) const = 0;
  // Its positions in slot order, body first; of the last `attend` that wanted them.
  virtual std::span<const std::int32_t> positions(int layer, int kv_head) const = 0;
  // The positions held now, in slot order; waits for the selection.
  virtual std::vector<std::vector<std::int32_t>> held_positions(int layer) = 0;

  // Entries of a layer that have moved to the body so far, those before `load` not counted. As of
  // the last `attend`.
  virtual std::int64_t quantised(int layer) const = 0;
  virtual std::int64_t reserved_bytes() const = 0;  // of device memory, work space included

  // From now on every kernel is timed (by events on a GPU); an empty function ends it. The clock
  // hears of them when results are waited for.
  virtual void time_kernels(kernel_clock clock) = 0;
  virtual void synchronise() = 0;  // until everything asked for is done
};

class compute_device {
 public:
  virtual ~compute_device() = default;
  virtual std::string name() const = 0;  // "NVIDIA H200, sm_90"
  // For measurements: fills the device's caches with something else; bytes read and written per
  // second when `bytes` are copied on the device with cold caches, the best of several copies.
  virtual void flush_caches() = 0;
  virtual double copy_bandwidth(std::int64_t bytes) = 0;
  // Throws std::invalid_argument for shapes and formats that `device_lacks` names.
  virtual std::unique_ptr<device_cache> make_cache(const cache_shape& shape,
                                                   const storage_format& format,
                                                   const device_rules& rules) = 0;
};

// What the device kernels cannot do of this, in words that complete "the device kernels have no";
// empty: nothing.
inline std::string device_lacks(const cache_shape& shape, const storage_format& format) {
  if (shape.group() > 128) return "groups of more than 128 query heads";
  if (shape.head_dim > 256 || shape.value_dim > 256) return "heads of more than 256 channels";
  if (format.tail != tail_format::fp16) return "FP32 tails";
  if (format.page != 0) return "paged layout";
  if (format.body == body_format::none) return {};
  if (format.body != body_format::int8) return "body format but INT8";
  if (format.scales != scale_format::hybrid && format.scales != scale_format::token) {
    return "scales per channel or group";
  }
  return {};
}

// The first CUDA device; null, with the reason in `why`, where there is none to use or the build
// has no CUDA. The program alone links it (kvreplay_cuda).
std::unique_ptr<compute_device> open_cuda_device(std::string& why);
// "13.0", the toolkit of the build, or "none".
std::string cuda_version();

// The same kernels on the host emulator, for tests (kvreplay_device_emulated).
std::unique_ptr<compute_device> open_emulated_device();

}  // namespace kvreplay::kernels
