// attend for any head_dim, value_dim <= 256 and any group, in FP32 on the ordinary lanes. A warp
// takes one entry at a time, a lane every 32nd channel; up to four query heads share what is read.
#pragma once

#include "kernels/attend_device.cuh"

namespace kvreplay::kernels::device {

inline constexpr int generic_rows = 4;  // query heads of a block
inline constexpr int generic_warps = attend_threads / simt::warp_size;
inline constexpr int lane_channels = largest_dim / simt::warp_size;

struct generic_state {
  float q[generic_rows][lane_channels];
  float out[generic_rows][lane_channels];
  float top[generic_rows], sum[generic_rows];
};

// q times the softmax scale and log2 e, and the channel scales where given.
SIMT_DEVICE void load_query(const attend_batch& a, const float* q, int first_row, int rows,
                            const float* channel_scale, generic_state& s) {
  const int lane = static_cast<int>(simt::thread_index() % simt::warp_size);
  SIMT_UNROLL
  for (int g = 0; g < generic_rows; ++g) {
    SIMT_UNROLL
    for (int j = 0; j < lane_channels; ++j) {
      const int c = lane + j * simt::warp_size;
      s.q[g][j] = 0;
      if (c >= a.head_dim || g >= rows) continue;
      const float x = q[(first_row + g) * a.head_dim + c] * a.softmax_scale * log2_e;
      s.q[g][j] = channel_scale == nullptr ? x : x * channel_scale[c];
    }
  }
}

SIMT_DEVICE float widen(std::int8_t code) { return static_cast<float>(code); }
SIMT_DEVICE float widen(std::uint16_t half) { return simt::half_to_float(half); }

// One entry: its score for every row, and its value into the outputs.
//   k [head_dim], v [value_dim]; k_scale and v_scale are the entry's scalars
template <class T>
SIMT_DEVICE void absorb_entry(const attend_batch& a, const T* k, const T* v, float k_scale,
                              float v_scale, int head, int first_row, int rows, int entry,
                              generic_state& s) {
  const int lane = static_cast<int>(simt::thread_index() % simt::warp_size);
  float key[lane_channels], value[lane_channels];
  SIMT_UNROLL
  for (int j = 0; j < lane_channels; ++j) {
    const int c = lane + j * simt::warp_size;
    key[j] = c < a.head_dim ? widen(k[c]) : 0.0F;
    value[j] = c < a.value_dim ? widen(v[c]) : 0.0F;
  }
  SIMT_UNROLL
  for (int g = 0; g < generic_rows; ++g) {
    float dot = 0;
    SIMT_UNROLL
    for (int j = 0; j < lane_channels; ++j) dot += s.q[g][j] * key[j];
    const float score = simt::warp_sum(dot) * k_scale;
    if (lane == 0 && g < rows) score_row(a, head, first_row + g)[entry] = score;
    const float top = simt::greater_of(s.top[g], score);
    const float shrink = simt::exp2_fast(s.top[g] - top), p = simt::exp2_fast(score - top);
    s.top[g] = top;
    s.sum[g] = s.sum[g] * shrink + p;
    SIMT_UNROLL
    for (int j = 0; j < lane_channels; ++j) {
      s.out[g][j] = s.out[g][j] * shrink + p * v_scale * value[j];
    }
  }
}

SIMT_DEVICE void absorb_body(const attend_batch& a, const head_storage& h, const float* q,
                             int first_row, int rows, generic_state& s) {
  const int lane = static_cast<int>(simt::thread_index() % simt::warp_size);
  const int warp = static_cast<int>(simt::thread_index()) / simt::warp_size;
  const int head = static_cast<int>(simt::block_y());
  load_query(a, q, first_row, rows, h.k_channel_scale, s);
  const entry_range part = split_range(a, h.body, static_cast<int>(simt::block_x()), generic_warps);
  for (int t = part.begin + warp; t < part.end; t += generic_warps) {
    absorb_entry(a, h.body_k + std::int64_t{t} * a.head_dim,
                 h.body_v + std::int64_t{t} * a.value_dim, simt::half_to_float(h.body_k_scale[t]),
                 simt::half_to_float(h.body_v_scale[t]), head, first_row, rows, t, s);
  }
  if (h.v_channel_scale == nullptr) return;
  SIMT_UNROLL
  for (int j = 0; j < lane_channels; ++j) {
    const int c = lane + j * simt::warp_size;
    const float scale = c < a.value_dim ? h.v_channel_scale[c] : 0.0F;
    SIMT_UNROLL
    for (int g = 0; g < generic_rows; ++g) s.out[g][j] *= scale;
  }
}

SIMT_DEVICE void absorb_tail(const attend_batch& a, const head_storage& h, const float* q,
                             int first_row, int rows, generic_state& s) {
  const int warp = static_cast<int>(simt::thread_index()) / simt::warp_size;
  const int head = static_cast<int>(simt::block_y());
  load_query(a, q, first_row, rows, nullptr, s);
  const entry_range part = split_range(a, h.tail, static_cast<int>(simt::block_x()), generic_warps);
  for (int t = part.begin + warp; t < part.end; t += generic_warps) {
    absorb_entry(a, h.tail_k + std::int64_t{t} * a.head_dim,
                 h.tail_v + std::int64_t{t} * a.value_dim, 1.0F, 1.0F, head, first_row, rows,
                 h.body + t, s);
  }
}

// grid (splits, heads, ceil(group / 4)), block 128
SIMT_KERNEL SIMT_BOUNDS(attend_threads, 2) attend_generic_kernel(attend_batch a) {
  SIMT_SHARED(float, shared, generic_warps* generic_rows*(largest_dim + 2));
  const attend_head& target = a.heads[simt::block_y()];
  const head_storage& h = *target.storage;
  const int first_row = static_cast<int>(simt::block_z()) * generic_rows;
  const int rows = simt::lesser_of(generic_rows, a.group - first_row);
  const int lane = static_cast<int>(simt::thread_index() % simt::warp_size);
  const int warp = static_cast<int>(simt::thread_index()) / simt::warp_size;
  generic_state s;
  SIMT_UNROLL
  for (int g = 0; g < generic_rows; ++g) {
    s.top[g] = lowest;
    s.sum[g] = 0;
    SIMT_UNROLL
    for (int j = 0; j < lane_channels; ++j) s.out[g][j] = 0;
  }
  absorb_body(a, h, target.q, first_row, rows, s);
  absorb_tail(a, h, target.q, first_row, rows, s);
  SIMT_UNROLL
  for (int g = 0; g < generic_rows; ++g) {
    float* mine = shared + (warp * generic_rows + g) * (a.value_dim + 2);
    SIMT_UNROLL
    for (int j = 0; j < lane_channels; ++j) {
      const int c = lane + j * simt::warp_size;
      if (c < a.value_dim) mine[c] = s.out[g][j];
    }
    if (lane == 0) {
      mine[a.value_dim] = s.top[g];
      mine[a.value_dim + 1] = s.sum[g];
    }
  }
  simt::sync_threads();
  write_partial(a, shared, generic_warps, generic_rows, rows, first_row);
}

}  // namespace kvreplay::kernels::device
