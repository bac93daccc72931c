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
  int layer = 0, head = 0;    // enter the hash: the layer's number in the model, the KV head
  int sinks = 0, recent = 0;  // protected: positions below sinks, positions > step - recent
};

struct select_batch {
  const select_head* heads = nullptr;  // [head_count], in device memory
  int head_count = 0;
  std::int32_t step = 0;
  rank_rule rule = rank_rule::position;
  float recency = 0;  // ema_log and ema_max
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

SIMT_DEVICE bool stays_by_rule(const select_batch& a, const select_head& h, std::int32_t position) {
  return position < h.sinks || position > std::int64_t{a.step} - h.recent;
}

SIMT_DEVICE float score_of(const head_storage& s, int entry) {
  return entry < s.body ? s.body_score[entry] : s.tail_score[entry - s.body];
}

// CONF-KV's rank in the host's order of operations (select.cpp). ema_max is the host's to the bit;
// ema_log differs as the two logarithms do, by a unit in the last place.
SIMT_DEVICE float rank_by_ema(const select_batch& a, float score, std::int32_t position,
                              float largest) {
  double worth = 0;
  if (a.rule == rank_rule::ema_log) {
    constexpr double per_log = 0.048254942433694648;  // 1 / ln 1e9
    const float bounded = score > 1e-9F ? score : 1e-9F;
    worth = simt::add(1.0, simt::multiply(static_cast<double>(simt::log_exact(bounded)), per_log));
  } else if (largest > 0) {
    worth = static_cast<double>(score > 0 ? score : 0.0F) / static_cast<double>(largest);
  }
  const double age = (double{1} + position) / (double{1} + a.step);
  const auto recency = static_cast<double>(a.recency);
  return static_cast<float>(
      simt::add(simt::multiply(1 - recency, worth), simt::multiply(recency, age)));
}

// What the entries of a head are ranked by: `largest` is the head's largest score, at least 0.
struct ranking {
  float largest;
  bool crowded;  // more is protected than the budget holds, so protection alone decides
};

SIMT_DEVICE float rank_of(const select_batch& a, const select_head& h, int entry, float largest) {
  const head_storage& s = *h.storage;
  if (a.rule == rank_rule::position) return 0;
  if (a.rule == rank_rule::hash) return hash_of(a, h, position_of(s, entry));
  const float score = score_of(s, entry);
  if (a.rule == rank_rule::score || !(score == score)) return score;
  return rank_by_ema(a, score, position_of(s, entry), largest);
}

// Higher stays; distinct for the entries among which the cut falls. Crowded: sinks in order, then
// the newest.
SIMT_DEVICE std::uint64_t key_of(const select_batch& a, const select_head& h, int entry,
                                 const ranking& by) {
  const std::int32_t position = position_of(*h.storage, entry);
  const bool guarded = stays_by_rule(a, h, position);
  if (by.crowded) {
    if (position < h.sinks) {
      return (std::uint64_t{2} << 32) + (0xffffffffu - ordered_position(position));
    }
    return guarded ? (std::uint64_t{1} << 32) + ordered_position(position) : 0;
  }
  if (guarded) return ~std::uint64_t{0};
  const std::uint32_t bits =
      simt::float_bits(simt::add(rank_of(a, h, entry, by.largest), 0.0F));  // -0: +0
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
                                  const ranking& by, int* counts, int* state) {
  std::uint64_t prefix = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    counts[thread()] = 0;
    simt::sync_threads();
    for (int e = thread(); e < n; e += select_threads) {
      const std::uint64_t key = key_of(a, h, e, by);
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
  SIMT_SHARED(int, state, 5);  // two for the search; protected, nan, bits of the largest score
  const select_head& h = a.heads[simt::block_x()];
  head_storage& s = *h.storage;
  const int n = s.body + s.tail, leaving = n - h.budget;
  if (thread() < 5) state[thread()] = 0;
  simt::sync_threads();
  for (int e = thread(); e < n; e += select_threads) {
    if (stays_by_rule(a, h, position_of(s, e))) simt::atomic_add(&state[2], 1);
    if (a.rule == rank_rule::position || a.rule == rank_rule::hash) continue;
    const float score = score_of(s, e);
    if (!(score == score)) simt::atomic_add(&state[3], 1);
    // Bits of positive floats order like the floats.
    if (score > 0) simt::atomic_max(&state[4], static_cast<int>(simt::float_bits(score)));
  }
  simt::sync_threads();
  const bool unsound = state[3] > 0;
  const ranking by = {simt::bits_float(static_cast<std::uint32_t>(state[4])), state[2] > h.budget};
  std::uint64_t cut = 0;
  const bool selects = leaving > 0 && !unsound;
  if (selects) cut = cut_key(a, h, n, leaving, by, counts, state);
  for (int e = thread(); e < n; e += select_threads) {
    h.keep[e] = !selects || key_of(a, h, e, by) > cut ? 1 : 0;
  }
  if (unsound && leaving > 0 && thread() == 0) s.fault |= fault_score_is_nan;
}

inline void launch_select(const select_batch& a, simt::stream_type stream) {
  if (a.heads == nullptr || a.head_count < 1) refuse("select", "there are no heads");
  if (!(a.recency >= 0 && a.recency <= 1)) refuse("select", "recency is not in 0..1");
  simt::launch(select_kernel, {static_cast<unsigned>(a.head_count)}, select_threads, a, stream);
}

// Marks what a layer's own window keeps after the append at `step`: positions > step - window.
struct window_head {
  head_storage* storage = nullptr;
  std::uint8_t* keep = nullptr;  // [most_entries], written: 1 = stays
  int window = 1;                // at least 1
};

struct window_batch {
  const window_head* heads = nullptr;  // [head_count], in device memory
  int head_count = 0;
  std::int32_t step = 0;
};

// grid (heads), block 256
SIMT_KERNEL SIMT_BOUNDS(select_threads, 4) window_kernel(window_batch a) {
  const window_head& h = a.heads[simt::block_x()];
  const head_storage& s = *h.storage;
  for (int e = thread(); e < s.body + s.tail; e += select_threads) {
    h.keep[e] = position_of(s, e) > std::int64_t{a.step} - h.window ? 1 : 0;
  }
}

inline void launch_window(const window_batch& a, simt::stream_type stream) {
  if (a.heads == nullptr || a.head_count < 1) refuse("window", "there are no heads");
  simt::launch(window_kernel, {static_cast<unsigned>(a.head_count)}, select_threads, a, stream);
}

}  // namespace kvreplay::kernels::device
