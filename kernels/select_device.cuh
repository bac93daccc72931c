// select on the device: marks the entries of each head that stay, by radix search for the key of
// the last one that leaves. Protection, order and ties are those of select.hpp.
#pragma once

#include "kernels/device_storage.cuh"
#include "kernels/select.hpp"

namespace kvreplay::kernels::device {

inline constexpr int select_threads = 256;

struct select_head {
  head_storage* storage = nullptr;
  std::uint8_t* keep = nullptr;  // [most_entries], written: 1 = stays
  int budget = 1;
  int layer = 0, head = 0;  // enter the hash: the layer's number in the model, the KV head
};

struct select_batch {
  const select_head* heads = nullptr;  // [head_count], in device memory
  int head_count = 0;
  std::int32_t step = 0;
  int sinks = 0, recent = 0;
  rank_rule rule = rank_rule::position;  // position, hash or score
  std::uint64_t seed = 0;
};

SIMT_DEVICE std::uint64_t mix_bits(std::uint64_t x) {  // splitmix64, as in select.cpp
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

SIMT_DEVICE float hash_of(const select_batch& a, const select_head& h, std::int32_t position) {
  std::uint64_t x = mix_bits(a.seed);
  x = mix_bits(x ^ static_cast<std::uint32_t>(h.layer));
  x = mix_bits(x ^ static_cast<std::uint32_t>(h.head));
  x = mix_bits(x ^ static_cast<std::uint32_t>(position));
  return static_cast<float>(x >> 40) * 0x1p-24F;
}

SIMT_DEVICE std::uint32_t ordered_position(std::int32_t position) {
  return static_cast<std::uint32_t>(position) ^ 0x80000000u;
}

SIMT_DEVICE bool stays_by_rule(const select_batch& a, std::int32_t position) {
  return position < a.sinks || position > std::int64_t{a.step} - a.recent;
}

SIMT_DEVICE float rank_of(const select_batch& a, const select_head& h, int entry) {
  const head_storage& s = *h.storage;
  if (a.rule == rank_rule::position) return 0;
  if (a.rule == rank_rule::hash) return hash_of(a, h, position_of(s, entry));
  return entry < s.body ? s.body_score[entry] : s.tail_score[entry - s.body];
}

// Higher stays; distinct for the entries among which the cut falls. `crowded`: more is protected
// than the budget holds, so protection alone decides: sinks in order, then the newest.
SIMT_DEVICE std::uint64_t key_of(const select_batch& a, const select_head& h, int entry,
                                 bool crowded) {
  const std::int32_t position = position_of(*h.storage, entry);
  const bool guarded = stays_by_rule(a, position);
  if (crowded) {
    if (position < a.sinks) {
      return (std::uint64_t{2} << 32) + (0xffffffffu - ordered_position(position));
    }
    return guarded ? (std::uint64_t{1} << 32) + ordered_position(position) : 0;
  }
  if (guarded) return ~std::uint64_t{0};
  const std::uint32_t bits = simt::float_bits(simt::add(rank_of(a, h, entry), 0.0F));  // -0: +0
  const std::uint32_t rising = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return std::uint64_t{rising} << 32 | ordered_position(position);
}

// Thread 0: the bin that holds the `leaving`-th smallest, counted within the prefix.
//   counts [256]; state: [0] bin found, [1] how many are still to leave inside it
SIMT_DEVICE void find_bin(const int* counts, int leaving, int* state) {
  int below = 0, bin = 0;
  while (below + counts[bin] < leaving) below += counts[bin++];
  state[0] = bin;
  state[1] = leaving - below;
}

// The key of the `leaving`-th smallest, byte by byte from the top. For all threads of the block.
SIMT_DEVICE std::uint64_t cut_key(const select_batch& a, const select_head& h, int n, int leaving,
                                  bool crowded, int* counts, int* state) {
  std::uint64_t prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    counts[thread()] = 0;
    simt::sync_threads();
    for (int e = thread(); e < n; e += select_threads) {
      const std::uint64_t key = key_of(a, h, e, crowded);
      // Shifting by 64 is undefined: the first byte has no prefix.
      if (shift < 56 && key >> (shift + 8) != prefix) continue;
      simt::atomic_add(&counts[key >> shift & 255u], 1);
    }
    simt::sync_threads();
    if (thread() == 0) find_bin(counts, leaving, state);
    simt::sync_threads();
    prefix = prefix << 8 | static_cast<std::uint64_t>(state[0]);
    leaving = state[1];
    simt::sync_threads();
  }
  return prefix;
}

// grid (heads), block 256
SIMT_KERNEL SIMT_BOUNDS(select_threads, 4) select_kernel(select_batch a) {
  SIMT_SHARED(int, counts, 256);
  SIMT_SHARED(int, state, 4);
  const select_head& h = a.heads[simt::block_x()];
  head_storage& s = *h.storage;
  const int n = s.body + s.tail, leaving = n - h.budget;
  if (thread() < 4) state[thread()] = 0;
  simt::sync_threads();
  for (int e = thread(); e < n; e += select_threads) {
    if (stays_by_rule(a, position_of(s, e))) simt::atomic_add(&state[2], 1);
    const float rank = rank_of(a, h, e);
    if (!(rank == rank)) simt::atomic_add(&state[3], 1);
  }
  simt::sync_threads();
  const bool crowded = state[2] > h.budget, unsound = state[3] > 0;
  std::uint64_t cut = 0;
  const bool selects = leaving > 0 && !unsound;
  if (selects) cut = cut_key(a, h, n, leaving, crowded, counts, state);
  for (int e = thread(); e < n; e += select_threads) {
    h.keep[e] = !selects || key_of(a, h, e, crowded) > cut ? 1 : 0;
  }
  if (unsound && leaving > 0 && thread() == 0) s.fault |= fault_score_is_nan;
}

inline void launch_select(const select_batch& a, simt::stream_type stream) {
  if (a.heads == nullptr || a.head_count < 1) refuse("select", "there are no heads");
  if (a.rule == rank_rule::ema_log || a.rule == rank_rule::ema_max) {
    refuse("select", "ema_log and ema_max rank on the host");
  }
  simt::launch(select_kernel, {static_cast<unsigned>(a.head_count)}, select_threads, a, stream);
}

}  // namespace kvreplay::kernels::device
