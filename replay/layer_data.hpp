// One layer of one sequence, read once, widened once, shared by all policies of a pass.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "kernels/attend.hpp"
#include "kernels/kv_cache.hpp"
#include "kernels/prompt_mass.hpp"
#include "policies/policy.hpp"
#include "replay/layer_inputs.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

// Rows of q, o, lse start at position first_row (<= n_prompt - 1); k and v at 0. A trace of
// attention alone has no q, k, v, but probability rows.
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
  std::vector<float> retention;      // [n_tokens, kv_heads] or empty
  std::vector<float> value_norm;     // [n_tokens, q_heads] where it was asked for, else empty
  std::vector<float> image_score;    // [n_tokens] or empty
  std::vector<double> rope_inv_freq;             // [rope_dim / 2] or empty
  std::vector<traces::half_bits> attention;      // [rows, q_heads, n_tokens], without q
  std::vector<std::int32_t> attention_position;  // [rows], ascending
  std::int64_t q_width = 0, k_width = 0, v_width = 0, o_width = 0;  // values per position

  const float* q_at(std::int64_t t) const {
    return &q[static_cast<size_t>((t - first_row) * q_width)];
  }
  const float* k_at(std::int64_t t) const { return &k[static_cast<size_t>(t * k_width)]; }
  const float* v_at(std::int64_t t) const { return &v[static_cast<size_t>(t * v_width)]; }
};

// value_norm: read it, or where the trace has none compute it from v and wo.
layer_data load_layer(const traces::reader& trace, int sequence, int layer,
                      bool value_norm = false);

// What score rules read of it. The spans point into `data`.
layer_inputs inputs_of(const layer_data& data);

// Probability rows [steps, q_heads, stride] of the full cache at positions first .. first + steps -
// 1, 0 where a query cannot see: from q, k and lse, or as recorded. lse [steps, q_heads] is filled
// where the trace has q but no lse and it is not null.
void full_rows_of(const kernels::cache_shape& shape, const layer_data& data, std::int64_t first,
                  std::int64_t steps, std::int64_t stride, float* rows, float* lse = nullptr);

// rows [q_heads, stride] of one query, columns 0 .. n-1 -> out [kv_heads, n], reduced over the
// query heads of a KV head (mean, max, sum) or of the layer (layer_mean), in double.
void reduce_row(const kernels::cache_shape& shape, const float* rows, std::int64_t stride,
                std::int64_t n, kernels::mass_layout reduce, std::vector<float>& out);

// What the prompt says about its positions, [kv_heads, n_prompt], computed when a policy first asks
// and kept for the others. Safe from several threads.
class prompt_observations {
 public:
  // `shape` holds this one layer as its layer 0. Both must outlive the object.
  prompt_observations(const kernels::cache_shape& shape, const layer_data& data)
      : shape_(&shape), data_(&data) {}

  // Called, from one thread at a time, with how much of a pass over a long prompt is done.
  void on_progress(std::function<void(double share)> call) { progress_ = std::move(call); }

  // Empty for prompt_seed::none and last_history.
  const std::vector<float>& scores(const policies::score_rule& rule, kernels::mass_layout reduce);

  // Calls visit(position, mass [kv_heads, n_prompt]) for the last n rows of the prompt (all, if it
  // is shorter), oldest first; 0 where a row cannot see.
  void each_of_last(std::int64_t n, kernels::mass_layout reduce,
                    const std::function<void(std::int64_t, const float*)>& visit) const;

 private:
  void reduce_column_sums(kernels::mass_layout reduce, std::vector<float>& out) const;
  void mean_of_recorded(std::int64_t rows, kernels::mass_layout reduce,
                        std::vector<float>& out) const;
  using key = std::pair<std::int64_t, kernels::mass_layout>;  // rows (-1: all), reduction
  const kernels::cache_shape* shape_;
  const layer_data* data_;
  std::function<void(double share)> progress_;
  std::mutex mutex_;
  std::map<key, std::vector<float>> known_;
};

}  // namespace kvreplay::replay
