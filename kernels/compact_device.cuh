// compact on the device: the entries that leave make holes, the k-th hole below the new length
// takes the k-th entry that stays above it. Sources and targets are apart, so rows move in
// parallel, and no more of them than must. Slots have no order; scores and positions move along.
#pragma once

#include "kernels/device_storage.cuh"

namespace kvreplay::kernels::device {

inline constexpr int compact_threads = 256;
inline constexpr int compact_warps = compact_threads / simt::warp_size;

struct compact_head {
  head_storage* storage = nullptr;
  const std::uint8_t* keep = nullptr;  // [body + tail]: 0 = leaves
  int* work = nullptr;                 // [2, most_entries]: holes, then entries that move
};

struct compact_batch {
  const compact_head* heads = nullptr;  // [head_count], in device memory
  int head_count = 0;
  int head_dim = 0, value_dim = 0;
  int most_entries = 0;  // at least the largest body + tail
};

// How many threads of lower index in the block say yes, and how many in all. `shared` [warps]; a
// barrier before the next use is the caller's.
SIMT_DEVICE int rank_in_block(bool yes, int* shared, int& total) {
  const unsigned votes = simt::ballot(yes);
  if (lane_of_warp() == 0) shared[warp_of_block()] = simt::population(votes);
  simt::sync_threads();
  int before = 0;
  total = 0;
  for (int w = 0; w < compact_warps; ++w) {
    before += w < warp_of_block() ? shared[w] : 0;
    total += shared[w];
  }
  return before + simt::population(votes & ((1u << lane_of_warp()) - 1));
}

// Indices of [begin, end) where (keep != 0) == kept, in order, into `out`; returns their number.
SIMT_DEVICE int list_entries(const std::uint8_t* keep, int begin, int end, bool kept, int* out,
                             int* shared) {
  int count = 0;
  for (int base = begin; base < end; base += compact_threads) {
    const int e = base + thread();
    const bool yes = e < end && (keep[e] != 0) == kept;
    int total;
    const int rank = rank_in_block(yes, shared, total);
    if (yes && out != nullptr) out[count + rank] = e;
    count += total;
    simt::sync_threads();
  }
  return count;
}

// A warp copies one row; in pieces of 16 bytes where rows allow it.
template <class T>
SIMT_DEVICE void copy_row(T* rows, int dim, int from, int to) {
  const T* source = rows + std::int64_t{from} * dim;
  T* target = rows + std::int64_t{to} * dim;
  const int bytes = dim * static_cast<int>(sizeof(T));
  if (bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(rows) % 16 == 0) {
    for (int i = lane_of_warp(); i < bytes / 16; i += simt::warp_size) {
      const int at = i * static_cast<int>(16 / sizeof(T));
      simt::store16(target + at, simt::read16(source + at));
    }
    return;
  }
  for (int i = lane_of_warp(); i < dim; i += simt::warp_size) target[i] = source[i];
}

struct tier_rows {
  std::uint16_t *half_k, *half_v;  // tail
  std::int8_t *code_k, *code_v;    // body
  std::uint16_t *scale_k, *scale_v;
  std::int32_t* position;
  float* score;
};

SIMT_DEVICE void move_entry(const compact_batch& a, const tier_rows& t, int from, int to) {
  if (t.code_k != nullptr) {
    copy_row(t.code_k, a.head_dim, from, to);
    copy_row(t.code_v, a.value_dim, from, to);
  } else {
    copy_row(t.half_k, a.head_dim, from, to);
    copy_row(t.half_v, a.value_dim, from, to);
  }
  if (lane_of_warp() != 0) return;
  t.position[to] = t.position[from];
  t.score[to] = t.score[from];
  if (t.code_k == nullptr) return;
  t.scale_k[to] = t.scale_k[from];
  t.scale_v[to] = t.scale_v[from];
}

// Returns the tier's new length.
SIMT_DEVICE int compact_tier(const compact_batch& a, const compact_head& h, const tier_rows& rows,
                             const std::uint8_t* keep, int n, int* shared) {
  int* holes = h.work;
  int* movers = h.work + a.most_entries;
  const int stay = list_entries(keep, 0, n, true, nullptr, shared);
  const int count = list_entries(keep, 0, stay, false, holes, shared);
  list_entries(keep, stay, n, true, movers, shared);
  simt::sync_threads();
  for (int i = warp_of_block(); i < count; i += compact_warps) {
    move_entry(a, rows, movers[i], holes[i]);
  }
  simt::sync_threads();
  return stay;
}

// grid (heads), block 256
SIMT_KERNEL SIMT_BOUNDS(compact_threads, 2) compact_kernel(compact_batch a) {
  SIMT_SHARED(int, shared, compact_warps);
  const compact_head& h = a.heads[simt::block_x()];
  head_storage& s = *h.storage;
  const int body = s.body, tail = s.tail;
  const tier_rows codes = {nullptr,        nullptr,        s.body_k,        s.body_v,
                           s.body_k_scale, s.body_v_scale, s.body_position, s.body_score};
  const tier_rows halves = {s.tail_k, s.tail_v, nullptr,         nullptr,
                            nullptr,  nullptr,  s.tail_position, s.tail_score};
  const int new_body = compact_tier(a, h, codes, h.keep, body, shared);
  const int new_tail = compact_tier(a, h, halves, h.keep + body, tail, shared);
  if (thread() != 0) return;
  s.body = new_body;
  s.tail = new_tail;
}

inline void launch_compact(const compact_batch& a, simt::stream_type stream) {
  if (a.heads == nullptr || a.head_count < 1) refuse("compact", "there are no heads");
  if (a.head_dim < 1 || a.value_dim < 1 || a.most_entries < 0) {
    refuse("compact", "a dimension is out of range");
  }
  simt::launch(compact_kernel, {static_cast<unsigned>(a.head_count)}, compact_threads, a, stream);
}

}  // namespace kvreplay::kernels::device
