// prompt_mass: what the prompt's own attention says about each prompt position. Full, unquantised
// attention; rows see the causal part inside the layer's window; learned sinks in the denominator.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/attend.hpp"
#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

struct prompt_rows {
  const float* q = nullptr;    // [n_prompt - first_row, q_heads, head_dim]
  const float* k = nullptr;    // [n_prompt, kv_heads, head_dim]
  const float* lse = nullptr;  // [n_prompt - first_row, q_heads] or null: recomputed
  std::int64_t first_row = 0;  // position of q's and lse's first row
  std::int64_t n_prompt = 0;
  // column_sums calls it now and then with how much of its work is done; may be empty.
  std::function<void(double share)> progress = {};
};

// Sum over the prompt's rows of the group's reduced mass: out [kv_heads, n_prompt]. Reduced over
// the query heads of each row first (mean | max | sum | layer_mean), then over rows, in double.
// Needs first_row = 0. Memory is linear in n_prompt.
void column_sums(const cache_shape& shape, int layer, const prompt_rows& rows, mass_layout reduce,
                 std::vector<float>& out);

// The probability rows of the last n prompt positions (fewer if the prompt is shorter or q starts
// later; the caller checks): out [n, q_heads, n_prompt], 0 where a row cannot see a position.
void last_rows(const cache_shape& shape, int layer, const prompt_rows& rows, std::int64_t n,
               std::vector<float>& out);

// Mean over the given rows (as last_rows gives them) of the reduced mass; each position's mean
// counts only the rows that can see it (causal and window). out [kv_heads, n_prompt].
void mean_of_rows(const cache_shape& shape, int layer, std::span<const float> rows, std::int64_t n,
                  std::int64_t n_prompt, mass_layout reduce, std::vector<float>& out);

// Probability rows [steps, q_heads, stride] of the full cache for queries at positions
// first .. first + steps - 1 over all keys each can see; 0 elsewhere. q [steps, q_heads, head_dim],
// k [first + steps, kv_heads, head_dim], lse [steps, q_heads] or null (then recomputed and, where
// lse_out is not null, written there).
void full_rows(const cache_shape& shape, int layer, const float* q, const float* k,
               const float* lse, std::int64_t first, std::int64_t steps, std::int64_t stride,
               float* rows, float* lse_out);

}  // namespace kvreplay::kernels
