// select: which entries stay. compact: the others leave, holes are filled, scores move along.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

// What ranks an entry. position: the newer the better. hash: counter-based hash of
// (seed, layer, head, position). score: the stored score. ema_log / ema_max: CONF-KV's
// (1 - recency) * e' + recency * (position + 1) / (t + 1), with e' = 1 + ln(max(e, 1e-9)) / ln(1e9)
// or e' = e / max e over the head's entries (0 when all are 0). given: the caller's own scores.
enum class rank_rule : std::uint8_t { position, hash, score, ema_log, ema_max, given };

struct select_item {
  kv_cache* cache = nullptr;
  int layer = 0;
  int model_layer = 0;          // the layer's number in the model: enters the hash
  std::int32_t step = 0;        // t, the newest position
  const int* budget = nullptr;  // [kv_heads] entries that may stay
  int sinks = 0;                // positions 0 .. sinks-1 are protected, then
  int recent = 0;               // positions > t - recent, the newest first
  rank_rule rule = rank_rule::position;
  float recency = 0;
  std::uint64_t seed = 0;
  bool one_set = false;  // scope=layer: scores are equal in all KV heads already
                         // (mass_layout::layer_mean); the hash leaves the head out
  // rank_rule::given: [kv_heads] scores in entry order, of the heads that hold more than the
  // budget.
  std::span<const std::vector<float>> given = {};
};

struct select_result {
  std::int64_t evicted = 0;  // entries that left, over the KV heads
  bool degenerate = false;   // more was protected than the budget holds
};

// The rank of an entry as one integer: higher stays. Score first (total order on floats, -0 = +0),
// then the newer position. Throws std::domain_error for NaN.
std::uint64_t rank_key(float score, std::int32_t position);

// The hash behind rank_rule::hash, in [0, 1). Independent of order and threads.
float position_hash(std::uint64_t seed, int layer, int head, std::int32_t position);

// Scores that rank the entries of one head under a rule, in entry order.
void rank_scores(const select_item& item, int kv_head, std::vector<float>& out);

// Selects and compacts. A head that holds no more than its budget is not touched. Protected entries
// stay by rule, never by infinite scores; if they alone exceed the budget, sinks stay first, then
// the newest. Equal scores: the newer position stays.
select_result select(const select_item& item);

// Keeps the entries of a head for which keep[entry] != 0. A few evictions fill the holes from the
// end of the tier, many gather. Returns the number that left.
int compact(kv_cache& cache, int layer, int kv_head, std::span<const std::uint8_t> keep);

}  // namespace kvreplay::kernels
