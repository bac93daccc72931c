// One layer of one sequence, read once, widened once, shared by all policies of a pass.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/attend.hpp"
#include "kernels/kv_cache.hpp"
#include "kernels/prompt_mass.hpp"
#include "policies/policy.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

// Rows of q, o, lse start at position first_row (<= n_prompt - 1); k and v at 0.
struct layer_data {
  int layer = 0;  // the model's number
  std::int64_t n_prompt = 0, n_tokens = 0, first_row = 0;
  std::vector<float> q;              // [n_tokens - first_row, q_heads, head_dim]
  std::vector<float> k;              // [n_tokens, kv_heads, head_dim]
  std::vector<float> v;              // [n_tokens, kv_heads, value_dim]
  std::vector<float> o;              // [n_tokens - first_row, q_heads, value_dim] or empty
  std::vector<float> lse;            // [n_tokens - first_row, q_heads] or empty
  std::vector<float> residual_norm;  // [n_tokens] or empty
  std::vector<float> column_sum;     // [q_heads, n_prompt], where first_row > 0 and the file has it
  std::int64_t q_width = 0, k_width = 0, v_width = 0, o_width = 0;  // values per position

  const float* q_at(std::int64_t t) const {
    return &q[static_cast<size_t>((t - first_row) * q_width)];
  }
  const float* k_at(std::int64_t t) const { return &k[static_cast<size_t>(t * k_width)]; }
  const float* v_at(std::int64_t t) const { return &v[static_cast<size_t>(t * v_width)]; }
};

layer_data load_layer(const traces::reader& trace, int sequence, int layer);

// What the prompt says about its positions, [kv_heads, n_prompt], computed when a policy first asks
// and kept for the others. Safe from several threads.
class prompt_observations {
 public:
  // `shape` holds this one layer as its layer 0. Both must outlive the object.
  prompt_observations(const kernels::cache_shape& shape, const layer_data& data)
      : shape_(&shape), data_(&data) {}

  // Empty for prompt_seed::none.
  const std::vector<float>& scores(const policies::score_rule& rule, kernels::mass_layout reduce);

 private:
  void reduce_column_sums(kernels::mass_layout reduce, std::vector<float>& out) const;
  using key = std::pair<std::int64_t, kernels::mass_layout>;  // rows (-1: all), reduction
  const kernels::cache_shape* shape_;
  const layer_data* data_;
  std::mutex mutex_;
  std::map<key, std::vector<float>> known_;
};

}  // namespace kvreplay::replay
