// attend: one decode query per query head over the entries of its KV head.
//   s_i = softmax_scale * q . k_i      lse = ln(sum_i e^{s_i} [+ e^{sink}])      o = sum_i p_i v_i
// p_i = e^{s_i - lse}: with learned sinks the mass of a head sums to 1 - p(sink).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

// How a step's probabilities become mass. mean, max, sum: over the query heads of a KV head's
// group. layer_mean: over all query heads of the layer, the same row for every KV head (TOVA,
// scope=layer; the heads then hold the same entries in the same slots).
enum class mass_layout : std::uint8_t { none, mean, max, sum, layer_mean, per_query_head };

struct attend_item {
  const kv_cache* cache = nullptr;
  int layer = 0;
  const float* q = nullptr;  // [q_heads, head_dim]
  float* o = nullptr;        // [q_heads, value_dim]
  float* lse = nullptr;      // [q_heads], natural log, learned sink included
  // mean | max | sum | layer_mean: [kv_heads, mass_stride]; per_query_head: [q_heads, mass_stride].
  // Entry order as in kv_cache.hpp. mass_stride >= the largest entry count; what lies beyond a
  // head's entries is not written.
  float* mass = nullptr;
  std::int64_t mass_stride = 0;
  mass_layout layout = mass_layout::none;
};

// A head with no entries gives o = 0 and lse = -inf (with a learned sink: lse = sink), never NaN.
// Results do not depend on anything but the entries and the active instruction set (isa.hpp): not
// on other items, threads or freed slots.
void attend(std::span<const attend_item> items);

// The scores of a query head against the INT8 entries of its KV head as exact integers:
//   softmax_scale * q . k_i = scale * (FP16 scalar of entry i, where there is one) * scores[i]
// up to the 15 bits that query_digits.hpp keeps of (q[c] * softmax_scale) * channel scale[c]. The
// same on every path and back end, bit for bit; attend computes with them where isa::avx512 is
// active.   q [head_dim]
struct head_integers {
  float scale;
  std::vector<std::int32_t> scores;  // [body entries]
};
// Throws std::invalid_argument for formats with groups, whose scores are not integers.
head_integers integer_scores(const kv_cache& cache, int layer, int q_head,
                             std::span<const float> q);

}  // namespace kvreplay::kernels
