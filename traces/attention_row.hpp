// One row of attention recomputed in double, for check. Internal to traces/.
#pragma once

#include <cstdint>
#include <vector>

#include "traces/reader.hpp"

namespace kvreplay::traces {

// Keys and values of one layer in double, grown slice by slice: head-major, so that the rows of one
// KV head lie together. [n_kv_heads][rows][dim]
class wide_cache {
 public:
  wide_cache(const model_info& model, std::int64_t capacity);
  void append(const layer_slice& slice);
  const double* k(int kv_head, std::int64_t t) const {
    return k_[static_cast<size_t>(kv_head)].data() + t * head_dim_;
  }
  const double* v(int kv_head, std::int64_t t) const {
    return v_[static_cast<size_t>(kv_head)].data() + t * value_dim_;
  }
  double largest_value(int kv_head, std::int64_t t) const {
    return largest_[static_cast<size_t>(kv_head)][static_cast<size_t>(t)];
  }

 private:
  std::int64_t head_dim_, value_dim_;
  std::vector<std::vector<double>> k_, v_;
  std::vector<std::vector<double>> largest_;  // max |v| of a position
};

struct attention_result {
  std::vector<double> p;     // [t + 1], zero before the window
  std::vector<double> o;     // [value_dim]
  double lse = 0;            // sink included
  double sink_share = 0;     // p(sink)
  double score_error = 0;    // 2^-10 * scale * max over visible i of sum |q_c k_ic|; 0 if not asked
  double largest_value = 0;  // max |v_i| over visible i
};

// Row t of query head `head`: q is [head_dim]. With `bound` also score_error and largest_value.
void recompute_row(const wide_cache& cache, const model_info& model, int layer, int head,
                   std::int64_t t, const double* q, bool bound, attention_result& out);

}  // namespace kvreplay::traces
