// Scores from the mean over all query heads of a layer (mass_layout::layer_mean), whose KV heads
// hold the same entries in the same slots: follows attend with mass_layout::per_query_head.
#pragma once

#include "kernels/attend_merge.cuh"

namespace kvreplay::kernels::device {

inline constexpr int layer_mean_threads = 128;

struct layer_mean_item {
  head_storage* heads = nullptr;  // [kv_heads]
  const float* mass = nullptr;    // [kv_heads * group, mass_stride]
};

struct layer_mean_batch {
  const layer_mean_item* items = nullptr;  // [item_count], in device memory
  int item_count = 0;
  int kv_heads = 1, group = 1;
  int most_entries = 0;
  std::int64_t mass_stride = 0;
  score_rule rule = score_rule::none;
  float decay = 0;
};

// In the host's order: the sums of the groups are added up (attend.cpp).
SIMT_DEVICE float mean_of_layer(const layer_mean_batch& a, const float* mass, int entry) {
  float sum = 0;
  for (int h = 0; h < a.kv_heads; ++h) {
    float part = 0;
    for (int g = 0; g < a.group; ++g) {
      part += mass[(std::int64_t{h} * a.group + g) * a.mass_stride + entry];
    }
    sum += part;
  }
  return sum * (1.0F / static_cast<float>(a.kv_heads * a.group));
}

// grid (ceil(most_entries / 128), items), block 128
SIMT_KERNEL SIMT_BOUNDS(layer_mean_threads, 8) layer_mean_kernel(layer_mean_batch a) {
  const layer_mean_item& item = a.items[simt::block_y()];
  const int e = static_cast<int>(simt::block_x()) * layer_mean_threads + thread();
  const head_storage& first = item.heads[0];
  if (e < first.body + first.tail) {
    const float mass = mean_of_layer(a, item.mass, e);
    if (is_bad_mass(mass)) simt::atomic_or(&item.heads[0].fault, fault_mass);
    for (int h = 0; h < a.kv_heads; ++h) {
      const head_storage& s = item.heads[h];
      float* score = e < s.body ? s.body_score + e : s.tail_score + (e - s.body);
      *score = updated_score(*score, mass, a.rule, a.decay);
    }
  }
}

inline void launch_layer_mean(const layer_mean_batch& a, simt::stream_type stream) {
  if (a.items == nullptr || a.item_count < 1) refuse("layer_mean", "there are no layers");
  if (a.item_count > 65535) refuse("layer_mean", "there are more than 65535 layers");
  if (a.rule == score_rule::none) refuse("layer_mean", "there is no score rule");
  const unsigned chunks = a.most_entries == 0 ? 1u : blocks_for(a.most_entries, layer_mean_threads);
  simt::launch(layer_mean_kernel, {chunks, static_cast<unsigned>(a.item_count)}, layer_mean_threads,
               a, stream);
}

}  // namespace kvreplay::kernels::device
