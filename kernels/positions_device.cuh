// The positions that heads hold, gathered into rows that come back in one copy.
#pragma once

#include "kernels/device_storage.cuh"

namespace kvreplay::kernels::device {

inline constexpr int positions_threads = 128;

struct positions_batch {
  const head_storage* const* heads = nullptr;  // [head_count], in device memory
  int head_count = 0;
  int most_entries = 0;
  std::int32_t* out = nullptr;  // [head_count, most_entries]: body, then tail
};

// grid (heads), block 128
SIMT_KERNEL SIMT_BOUNDS(positions_threads, 8) positions_kernel(positions_batch a) {
  const head_storage& s = *a.heads[simt::block_x()];
  std::int32_t* out = a.out + std::int64_t{simt::block_x()} * a.most_entries;
  for (int e = thread(); e < s.body + s.tail; e += positions_threads) out[e] = position_of(s, e);
}

inline void launch_positions(const positions_batch& a, simt::stream_type stream) {
  if (a.heads == nullptr || a.head_count < 1) refuse("positions", "there are no heads");
  simt::launch(positions_kernel, {static_cast<unsigned>(a.head_count)}, positions_threads, a,
               stream);
}

}  // namespace kvreplay::kernels::device
