// Chooses the tier and starts the two kernels of an attend step: one source for nvcc and the host.
#pragma once

#include "kernels/attend_generic.cuh"
#include "kernels/attend_merge.cuh"
#include "kernels/attend_mma.cuh"

namespace kvreplay::kernels::device {

enum class attend_tier : std::uint8_t { automatic, generic };  // generic: for comparison

inline bool has_mma_tier(const attend_batch& a) {
  return a.head_dim == a.value_dim && (a.head_dim == 64 || a.head_dim == 128);
}

inline void check_batch(const attend_batch& a) {
  if (a.heads == nullptr || a.scores == nullptr || a.partial_o == nullptr ||
      a.partial_state == nullptr) {
    refuse("attend", "a pointer of the batch is null");
  }
  if (a.head_count < 1) refuse("attend", "head_count is below 1");
  if (a.group < 1 || a.group > largest_group) refuse("attend", "group is not in 1..128");
  if (a.head_dim < 1 || a.head_dim > largest_dim || a.value_dim < 1 || a.value_dim > largest_dim) {
    refuse("attend", "head_dim or value_dim is not in 1..256");
  }
  if (a.splits < 1 || a.most_entries < 0)
    refuse("attend", "splits or most_entries is out of range");
  if (a.split_entries < 0 || a.split_entries % simt::warp_size != 0)
    refuse("attend", "split_entries is not a multiple of 32");
  if (a.reduce == mass_layout::layer_mean) refuse("attend", "layer_mean spans KV heads");
  if (a.rule != score_rule::none &&
      (a.reduce == mass_layout::none || a.reduce == mass_layout::per_query_head)) {
    refuse("attend", "a score rule needs mass reduced over the group");
  }
}

inline constexpr int largest_grid_y = 65535;

// The heads from `first` on, as many as one launch can have.
inline attend_batch batch_part(const attend_batch& a, int first) {
  attend_batch part = a;
  part.heads = a.heads + first;
  part.head_count = a.head_count - first < largest_grid_y ? a.head_count - first : largest_grid_y;
  part.scores = score_row(a, first, 0);
  part.partial_o = a.partial_o + partial_row(a, first, 0, 0) * a.value_dim;
  part.partial_state = a.partial_state + partial_row(a, first, 0, 0) * 2;
  return part;
}

inline void launch_attend_part(const attend_batch& a, attend_tier tier, simt::stream_type stream) {
  const auto splits = static_cast<unsigned>(a.splits), heads = static_cast<unsigned>(a.head_count);
  if (tier == attend_tier::automatic && has_mma_tier(a)) {
    const simt::extent grid = {splits, heads, blocks_for(a.group, mma_rows)};
    simt::launch(a.head_dim == 64 ? attend_mma_kernel<64> : attend_mma_kernel<128>, grid,
                 attend_threads, a, stream);
  } else {
    const simt::extent grid = {splits, heads, blocks_for(a.group, generic_rows)};
    simt::launch(attend_generic_kernel, grid, attend_threads, a, stream);
  }
  const unsigned chunks = a.most_entries == 0 ? 1u : blocks_for(a.most_entries, merge_entries);
  simt::launch(attend_merge_kernel, {chunks, heads}, attend_threads, a, stream);
}

// o, lse, mass and scores of every head of the batch. Throws simt::failure where the batch or CUDA
// refuses; the results are there when the stream has come to them.
inline void launch_attend(const attend_batch& a, attend_tier tier, simt::stream_type stream) {
  check_batch(a);
  for (int first = 0; first < a.head_count; first += largest_grid_y) {
    launch_attend_part(batch_part(a, first), tier, stream);
    if (a.head_count - first <= largest_grid_y) break;  // first + largest_grid_y may not fit
  }
}

}  // namespace kvreplay::kernels::device
