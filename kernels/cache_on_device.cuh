// device_cache over the device kernels: the class. Its entries are device_cache_entries.cuh, its
// steps device_cache_steps.cuh. One source for nvcc and for the host emulator: nothing here may
// include fmt (nvcc does not compile it) or belong to a program twice, once for each compiler.
#pragma once

#include <limits>
#include <memory>
#include <stdexcept>

#include "kernels/attend_launch.cuh"
#include "kernels/compact_device.cuh"
#include "kernels/device_arena.cuh"
#include "kernels/device_cache.hpp"
#include "kernels/device_staging.cuh"
#include "kernels/layer_mean_device.cuh"
#include "kernels/positions_device.cuh"
#include "kernels/quantise_device.cuh"
#include "kernels/select_device.cuh"

namespace kvreplay::kernels::device {

// Entries of a tier that one block of attend takes: fixed, so that bits do not depend on the batch.
inline constexpr int entries_per_split = 256;

class cache_on_device final : public device_cache {
 public:
  cache_on_device(const cache_shape& shape, const storage_format& format, const device_rules& rules)
      : shape_(shape),
        format_(format),
        rules_(rules),
        arenas_(static_cast<std::size_t>(shape.layers)),
        newest_(arenas_.size(), std::numeric_limits<std::int32_t>::min()),
        aged_(arenas_.size(), 0),
        mirror_(arenas_.size() * static_cast<std::size_t>(shape.kv_heads)),
        held_(mirror_.size(), 0),
        positions_(mirror_.size()),
        storage_(mirror_),
        sink_logits_(shape.sink_logits) {}

  void load(int layer, std::span<const head_store> heads) override;
  void save(int layer, std::span<head_store> heads) override;
  void attend(std::span<const device_step> items, bool want_positions) override;
  std::int64_t select(std::span<const device_selection> items) override;
  head_counts counts(int layer, int kv_head) const override {
    const head_storage& s = mirror_[index(layer, kv_head)];
    return {s.body, s.tail};
  }
  std::span<const std::int32_t> positions(int layer, int kv_head) const override {
    return positions_[index(layer, kv_head)];
  }
  std::vector<std::vector<std::int32_t>> held_positions(int layer) override;
  std::int64_t quantised(int layer) const override;
  std::int64_t reserved_bytes() const override;
  void time_kernels(kernel_clock clock) override { stream_.listen(std::move(clock)); }
  void synchronise() override { stream_.wait(); }

 private:
  // What the kernels of one step share.
  struct step_views {
    std::vector<window_head> windows;
    std::vector<append_head> appends;
    std::vector<attend_head> attends;
    std::vector<layer_mean_item> layers;
    std::vector<const head_storage*> gathered;
    const head_storage* const* gathered_there = nullptr;
    int most = 0;     // entries of a head, at most; a multiple of 64
    int longest = 0;  // of one tier, at most
  };

  std::size_t index(int layer, int kv_head) const;
  std::span<head_storage> mirror_of(int layer) {
    return std::span(mirror_).subspan(index(layer, 0), static_cast<std::size_t>(shape_.kv_heads));
  }
  head_storage* on_device(int layer, int kv_head) const {
    return storage_.get() + index(layer, kv_head);
  }
  void check_items(std::span<const device_step> items) const;
  // The most that a head can hold in each tier once the newcomer is in.
  head_room bound_of(const device_step& item, int kv_head) const;
  void make_room(const device_step& item);
  void grow(int layer, const head_room& room);
  void fetch_storage(int layer);
  void send_storage(int layer);
  step_views views_of(std::span<const device_step> items);
  void add_window(const device_step& item, step_views& views);
  void stage_rows(std::span<const device_step> items, step_views& views);
  std::uint8_t* keep_room(std::size_t heads, int most, int*& work);
  void launch_step(std::span<const device_step> items, step_views& views);
  void launch_attention(const step_views& views, const attend_head* heads,
                        const layer_mean_item* layers);
  const std::int32_t* gather_positions(const head_storage* const* heads, std::size_t count,
                                       int most);
  void fetch_results(std::span<const device_step> items, const step_views& views,
                     bool want_positions);
  void check_faults(int layer, const device_step* item);
  void check_newcomer(const device_step& item, int kv_head) const;
  template <class T>
  std::vector<T> read(const T* from, int n) const;
  std::int32_t bad_entry(const head_storage& s) const;
  std::int32_t aging_entry(const head_storage& s, std::int32_t step) const;
  std::string place_of(const char* operation, int layer, int kv_head, std::int32_t position) const;

  cache_shape shape_;
  storage_format format_;
  device_rules rules_;
  timed_stream stream_;
  std::vector<std::unique_ptr<layer_arena>> arenas_;  // [layers]
  std::vector<std::int32_t> newest_;                  // [layers], the last position appended
  std::vector<std::uint8_t> aged_;                    // [layers], a step has run since load
  std::vector<head_storage> mirror_;                  // [layers, kv_heads], as of the last attend
  std::vector<int> held_;                             // [layers, kv_heads], now
  std::vector<std::vector<std::int32_t>> positions_;  // [layers, kv_heads]
  device_buffer<head_storage> storage_;               // [layers, kv_heads]
  device_buffer<float> sink_logits_;                  // [layers, q_heads]
  upload_stage step_stage_, select_stage_;
  bool selecting_ = false;  // select_stage_ is on its way
  scratch_array<std::uint8_t> keep_;
  scratch_array<int> work_;
  scratch_array<float> scores_, partial_, mass_, results_;
  scratch_array<std::int32_t> gathered_;
  pinned_memory results_host_, positions_host_, storage_host_;
};

}  // namespace kvreplay::kernels::device
