// The L1 norm of each value through a query head's slice of the output projection, for a block of
// positions at once: sum over hidden channels j of |sum_c v[c] wo[c][j]|. Nothing of size
// positions x hidden is ever stored.
#pragma once

#include "kernels/device_storage.cuh"

namespace kvreplay::kernels::device {

inline constexpr int norm_threads = 128;
inline constexpr int norm_positions = 8;  // of a block
inline constexpr int norm_dim = 256;      // largest value_dim

struct value_norm_batch {
  const float* v = nullptr;   // [positions, kv_heads, value_dim]
  const float* wo = nullptr;  // [q_heads, value_dim, hidden]
  float* out = nullptr;       // [positions, q_heads]
  int positions = 0, q_heads = 0, kv_heads = 0, value_dim = 0, hidden = 0;
};

// |v wo| summed over this thread's hidden channels, for every position of the block.
//   values [norm_positions, value_dim], zero beyond the last position
SIMT_DEVICE void add_norms(const value_norm_batch& a, const float* values, int head,
                           float (&norm)[norm_positions]) {
  const float* weights = a.wo + std::int64_t{head} * a.value_dim * a.hidden;
  for (int j = thread(); j < a.hidden; j += norm_threads) {
    float dot[norm_positions] = {};
    for (int c = 0; c < a.value_dim; ++c) {
      const float w = weights[std::int64_t{c} * a.hidden + j];
      SIMT_UNROLL
      for (int p = 0; p < norm_positions; ++p) dot[p] += values[p * a.value_dim + c] * w;
    }
    SIMT_UNROLL
    for (int p = 0; p < norm_positions; ++p) norm[p] += simt::abs_value(dot[p]);
  }
}

// grid (ceil(positions / 8), q_heads), block 128
SIMT_KERNEL SIMT_BOUNDS(norm_threads, 4) value_norm_kernel(value_norm_batch a) {
  SIMT_SHARED(float, values, norm_positions* norm_dim);
  SIMT_SHARED(float, sums, norm_threads / simt::warp_size * norm_positions);
  const int head = static_cast<int>(simt::block_y());
  const int kv_head = head / (a.q_heads / a.kv_heads);
  const int first = static_cast<int>(simt::block_x()) * norm_positions;
  for (int i = thread(); i < norm_positions * a.value_dim; i += norm_threads) {
    const int p = first + i / a.value_dim, c = i % a.value_dim;
    values[i] =
        p < a.positions ? a.v[(std::int64_t{p} * a.kv_heads + kv_head) * a.value_dim + c] : 0.0F;
  }
  simt::sync_threads();
  float norm[norm_positions] = {};
  add_norms(a, values, head, norm);
  SIMT_UNROLL
  for (int p = 0; p < norm_positions; ++p) {
    norm[p] = simt::warp_sum(norm[p]);
    if (lane_of_warp() == 0) sums[warp_of_block() * norm_positions + p] = norm[p];
  }
  simt::sync_threads();
  const int p = thread();
  if (p >= norm_positions || first + p >= a.positions) return;
  float total = 0;
  for (int w = 0; w < norm_threads / simt::warp_size; ++w) total += sums[w * norm_positions + p];
  a.out[std::int64_t{first + p} * a.q_heads + head] = total;
}

inline void launch_value_norm(const value_norm_batch& a, simt::stream_type stream) {
  if (a.v == nullptr || a.wo == nullptr || a.out == nullptr) {
    refuse("value_norm", "a pointer of the batch is null");
  }
  if (a.positions < 1 || a.hidden < 1 || a.value_dim < 1 || a.value_dim > norm_dim) {
    refuse("value_norm", "positions, hidden or value_dim is out of range");
  }
  if (a.kv_heads < 1 || a.q_heads > 65535 || a.q_heads < 1 || a.q_heads % a.kv_heads != 0) {
    refuse("value_norm", "q_heads is not a multiple of kv_heads");
  }
  simt::launch(value_norm_kernel,
               {blocks_for(a.positions, norm_positions), static_cast<unsigned>(a.q_heads)},
               norm_threads, a, stream);
}

}  // namespace kvreplay::kernels::device
