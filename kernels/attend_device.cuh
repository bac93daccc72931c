// attend on the device: what its kernels share. Two tiers compute scores, running maxima and sums,
// and partial outputs per split (attend_generic.cuh for every shape, attend_mma.cuh for head_dim 64
// and 128); attend_merge.cuh turns them into o, lse, mass and new scores.
#pragma once

#include <cstdint>

#include "kernels/attend.hpp"
#include "kernels/device_storage.cuh"
#include "kernels/simt/simt.hpp"
#include "kernels/update_scores.hpp"

namespace kvreplay::kernels::device {

inline constexpr int attend_threads = 128;
inline constexpr int largest_group = 128;
inline constexpr int largest_dim = 256;

// A query against one KV head, and where its results go.
struct attend_head {
  head_storage* storage = nullptr;  // entries and, unless the rule is none, their scores
  const float* q = nullptr;         // [group, head_dim]
  const float* sink = nullptr;      // [group], learned logits, or null
  float* o = nullptr;               // [group, value_dim]
  float* lse = nullptr;             // [group]
  float* mass = nullptr;            // [body + tail], per_query_head: [group, mass_stride]; or null
};

struct attend_batch {
  const attend_head* heads = nullptr;  // [head_count], in device memory
  int head_count = 0;
  int group = 1, head_dim = 0, value_dim = 0;
  float softmax_scale = 1;
  int splits = 1;  // blocks that share the entries of a head
  // What a block takes of each tier: an even part, or this many entries (a multiple of 32), so that
  // a head's bits do not depend on the others of the batch. splits * split_entries must then reach
  // the larger tier of every head.
  int split_entries = 0;
  int most_entries = 0;                    // at least the largest body + tail of the batch
  mass_layout reduce = mass_layout::none;  // none, mean, max, sum or per_query_head
  std::int64_t mass_stride = 0;            // per_query_head only
  score_rule rule = score_rule::none;
  float decay = 0;
  // Work space in device memory.
  float* scores = nullptr;         // [head_count, group, most_entries], log2 domain
  float* partial_o = nullptr;      // [head_count, splits, group, value_dim]
  float* partial_state = nullptr;  // [head_count, splits, group, 2]: reference exponent, sum
};

// The part of n entries of a tier that a split works on; multiples of `step`, the last one cut
// short.
struct entry_range {
  int begin, end;
};
SIMT_DEVICE entry_range split_range(const attend_batch& a, int n, int split, int step) {
  const int steps = (n + step - 1) / step;
  const int per = a.split_entries > 0 ? a.split_entries : (steps + a.splits - 1) / a.splits * step;
  const int begin = simt::lesser_of(split * per, n);
  return {begin, simt::lesser_of(begin + per, n)};
}

// Offset of (head, split, row) in the partial arrays, in rows.
SIMT_EITHER std::int64_t partial_row(const attend_batch& a, int head, int split, int row) {
  return (std::int64_t{head} * a.splits + split) * a.group + row;
}

// The scores of query head `row` of KV head `head`.
SIMT_EITHER float* score_row(const attend_batch& a, int head, int row) {
  return a.scores + (std::int64_t{head} * a.group + row) * a.most_entries;
}

// Combines the warps' partial results of one block and writes the split's.
//   shared [warps][rows][value_dim + 2]: output, reference exponent, sum
//   row_count rows count, the first of which is query head `first_row`
SIMT_DEVICE void write_partial(const attend_batch& a, const float* shared, int warps, int rows,
                               int row_count, int first_row) {
  const int dim = a.value_dim, pitch = dim + 2;
  const int head = static_cast<int>(simt::block_y()), split = static_cast<int>(simt::block_x());
  for (int i = static_cast<int>(simt::thread_index()); i < row_count * dim; i += attend_threads) {
    const int row = i / dim, c = i % dim;
    float top = lowest, sum = 0, out = 0;
    for (int w = 0; w < warps; ++w) {
      top = simt::greater_of(top, shared[(w * rows + row) * pitch + dim]);
    }
    for (int w = 0; w < warps; ++w) {
      const float* part = shared + (w * rows + row) * pitch;
      const float factor = simt::exp2_fast(part[dim] - top);
      sum += factor * part[dim + 1];
      out += factor * part[c];
    }
    const std::int64_t at = partial_row(a, head, split, first_row + row);
    a.partial_o[at * dim + c] = out;
    if (c == 0) {
      a.partial_state[at * 2] = top;
      a.partial_state[at * 2 + 1] = sum;
    }
  }
}

}  // namespace kvreplay::kernels::device
