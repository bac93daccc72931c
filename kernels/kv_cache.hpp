// The KV cache of one sequence under one policy: entries per (layer, KV head), with their positions
// and scores, in up to two tiers of precision. It stores; what happens to entries is decided by the
// operations beside it (append, attend, update_scores, select, compact, age), each in its own file.
//
// Slots have no order. Within a tier the slots 0..n-1 are dense and each carries its position. In
// the contiguous layout a head's rows lie in slot order in arrays of its own; in the paged layout
// they lie in pages of `storage_format::page` rows that the KV heads of a layer share, and a table
// per head and tier lists its pages in slot order. The layout decides where bytes lie and nothing
// else: slots, codes, o, lse, mass and kept sets are the same bit for bit.
// Entry index e of a (layer, KV head): first the body (low precision), then the tail, so
// e in [0, body) is body slot e and e in [body, body + tail) is tail slot e - body. Mass and score
// rows are laid out in that order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/half.hpp"
#include "kernels/payload.hpp"

namespace kvreplay::kernels {

// How channels of a key are paired by the rotary embedding: decides which channels share a
// calibrated scale. half: c and c + rope_dim/2; interleaved: 2c and 2c+1; none: no pairs.
enum class rope_pairing { none, half, interleaved };

struct cache_shape {
  int layers = 0;   // layers held by this cache; indices below are 0..layers-1
  int q_heads = 0;  // a multiple of kv_heads
  int kv_heads = 0;
  int head_dim = 0;  // channels of q and k
  int value_dim = 0;
  double softmax_scale = 1;
  rope_pairing rope = rope_pairing::none;
  int rope_dim = 0;         // rotated channels, 0 = head_dim; the rest is paired with nothing
  std::vector<int> window;  // [layers], the query included; 0 = global; empty = all global
  std::vector<float> sink_logits;  // [layers, q_heads] or empty: learned logits in the denominator
  int group() const { return q_heads / kv_heads; }
  int window_of(int layer) const { return window.empty() ? 0 : window[static_cast<size_t>(layer)]; }
};

enum class tail_format : std::uint8_t { fp16, fp32 };  // fp32: for references only
enum class body_format : std::uint8_t { none, int8, int4 };
// hybrid: channel scale x FP16 scalar per token; token: the same with a channel table of ones;
// channel_grow / channel_static: one FP32 scale per channel, no token scalar (KERNELS, section 2);
// group: one FP16 scale per channel for groups of 64 entries in order of ageing (groups.hpp). int4
// has scales of its own kind and reads none of this.
enum class scale_format : std::uint8_t { hybrid, token, channel_grow, channel_static, group };

struct storage_format {
  tail_format tail = tail_format::fp16;
  body_format body = body_format::none;
  scale_format scales = scale_format::hybrid;
  int tail_window = 128;        // W: after step t an entry is in the tail iff position > t - W ...
  int tail_sinks = 0;           // ... or position < tail_sinks, or its group is not full yet
  float static_margin = 1.25F;  // channel_static: scale = margin * absmax / 127
  int page = 0;                 // paged layout: entries per page, a power of two; 0: contiguous
  bool operator==(const storage_format&) const = default;
};

// Counted by `age` over the life of the cache.
struct storage_events {
  std::int64_t quantised = 0;    // entries that moved to the body
  std::int64_t requantised = 0;  // channels whose scale grew (channel_grow)
  std::int64_t clipped = 0;      // values beyond a frozen scale (channel_static)
};

// One KV head of one layer. Plain storage; the invariants (equal lengths, positions unique) are the
// operations' to keep. Scores stand beside the entries so that they move with them. The payload's
// arrays are empty in the paged layout: kv_cache::payload says where rows are.
struct head_store : payload_rows {
  std::vector<std::int32_t> tail_position;
  std::vector<float> tail_score;
  std::vector<std::int32_t> body_position;
  std::vector<float> body_score;
  // Formats with groups: the group of each body entry, and [groups][head_dim], [groups][value_dim].
  std::vector<std::int32_t> body_group;
  std::vector<half_bits> group_k_scale, group_k_zero, group_v_scale;
  int groups = 0;
  // Paged layout: pages of the layer's pool in slot order.
  std::vector<std::int32_t> tail_pages, body_pages;
  // Channel scales, [head_dim] and [value_dim]; empty until calibrated, and always in
  // scale_format::token, whose table of ones is not stored.
  std::vector<float> k_channel_scale, v_channel_scale;

  int body_size() const { return static_cast<int>(body_position.size()); }
  int tail_size() const { return static_cast<int>(tail_position.size()); }
  int size() const { return body_size() + tail_size(); }
  std::int32_t position(int entry) const {
    return entry < body_size() ? body_position[static_cast<size_t>(entry)]
                               : tail_position[static_cast<size_t>(entry - body_size())];
  }
  float score(int entry) const {
    return entry < body_size() ? body_score[static_cast<size_t>(entry)]
                               : tail_score[static_cast<size_t>(entry - body_size())];
  }
  void set_score(int entry, float value) {
    (entry < body_size() ? body_score[static_cast<size_t>(entry)]
                         : tail_score[static_cast<size_t>(entry - body_size())]) = value;
  }
};

// A score that no observation has touched yet. Observed scores of sum and ema rules are >= 0.
inline constexpr float unobserved_score = -1.0F;

// Copying a cache is the snapshot, assigning it back the restore: state and events return exactly,
// slot order included. Distinct layers may be worked on by distinct threads at the same time.
class kv_cache {
 public:
  // Throws std::invalid_argument where a shape cannot be (heads not divisible, dims < 1 or > 256
  // ...).
  kv_cache(cache_shape shape, storage_format format);

  const cache_shape& shape() const { return shape_; }
  const storage_format& format() const { return format_; }
  head_store& head(int layer, int kv_head);
  const head_store& head(int layer, int kv_head) const;

  // The arrays in which a head's rows lie, and which row a slot has there.
  payload_rows& payload(int layer, int kv_head);
  const payload_rows& payload(int layer, int kv_head) const;
  row_pages rows_of(int layer, int kv_head, tier t) const;
  const row_widths& widths() const { return widths_; }
  // Gives a tier room for `n` rows, no more: pages beyond them go back to the layer's pool. Rows
  // below both sizes stay as they are.
  void resize_payload(int layer, int kv_head, tier t, std::int64_t n);
  // Paged layout: pages that no head of the layer holds.
  const std::vector<std::int32_t>& free_pages(int layer, tier t) const;

  int entries(int layer, int kv_head) const { return head(layer, kv_head).size(); }
  int max_entries(int layer) const;  // over the KV heads of the layer
  std::vector<std::int32_t> positions(int layer, int kv_head) const;  // ascending

  // Bytes stored for keys and values: payload by precision, per-entry scalars, scales of groups
  // that have a member, channel tables (float32, counted from the first step wherever the format
  // has one). Never nominal.
  std::int64_t payload_bytes(int layer) const;
  std::int64_t payload_bytes() const;
  // Positions (int32) and one float score per entry, and the number of its group for those that
  // have one. Reported apart from the payload.
  std::int64_t state_bytes(int layer) const;
  // For the payload, slack included: what is allocated, or in the paged layout all of every page
  // that a head holds (those in the pool are free for others).
  std::int64_t reserved_bytes() const;
  storage_events events() const;      // summed over layers
  storage_events& events(int layer);  // a layer's own counters

  // Calls visit for every array and number that the cache holds, in one order: what a snapshot on
  // disk keeps. A cache of the same shape and format that takes them over is the same cache.
  template <class Visit>
  void for_each_state(Visit&& visit) {
    for (head_store& h : heads_) {
      kernels::for_each_state(static_cast<payload_rows&>(h), visit);
      visit(h.tail_position);
      visit(h.tail_score);
      visit(h.body_position);
      visit(h.body_score);
      visit(h.body_group);
      visit(h.group_k_scale);
      visit(h.group_k_zero);
      visit(h.group_v_scale);
      visit(h.groups);
      visit(h.tail_pages);
      visit(h.body_pages);
      visit(h.k_channel_scale);
      visit(h.v_channel_scale);
    }
    for (page_pool& pool : pools_) pool.for_each_state(visit);
    for (storage_events& e : events_) visit(e);
  }

 private:
  cache_shape shape_;
  storage_format format_;
  row_widths widths_;
  std::vector<head_store> heads_;       // [layers, kv_heads]
  std::vector<page_pool> pools_;        // [layers], or none: contiguous
  std::vector<storage_events> events_;  // [layers]
};

// Where row (token, head) of a [tokens, heads, dim] array begins. 64 bits before the first
// multiply.
constexpr std::int64_t row_offset(std::int64_t token, std::int64_t heads, std::int64_t head,
                                  std::int64_t dim) {
  return (token * heads + head) * dim;
}

// Payload bytes that one (layer, KV head) takes with `tail` and `body` entries, the latter of
// `groups` groups where the format has them; tables included.
std::int64_t payload_bytes(const cache_shape&, const storage_format&, std::int64_t tail,
                           std::int64_t body, std::int64_t groups = 0);

// One FP32 scale per channel of a KV head, apart from any entry.
bool has_channel_table(const storage_format&);

}  // namespace kvreplay::kernels
