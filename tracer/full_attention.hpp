// full_attention: every position kept, as blocked matrix products over many query rows.
#pragma once

#include <cstdint>

namespace kvreplay::tracer {

struct full_attention_shape {
  int q_heads = 0, kv_heads = 0, head_dim = 0, value_dim = 0;
  double softmax_scale = 1;
  int window = 0;  // 0 = global
};

// Rows at positions first .. first + rows - 1 over the keys 0 .. first + rows - 1 each can see.
//   q [rows, q_heads, head_dim]; k, v [first + rows, kv_heads, ...] -> o [rows, q_heads,
//   value_dim], lse [rows, q_heads]. Scores and sums in FP32, log-sum-exp. Bits of a row do not
//   depend on how
// many rows the call has, nor on threads.
void full_attention(const full_attention_shape& shape, std::int64_t first, std::int64_t rows,
                    const float* q, const float* k, const float* v, float* o, float* lse);

// Adds to sums [q_heads, stride] the probability that each key receives from the rows, row after
// row, so that the sums do not depend on how a prompt was cut into calls. lse [rows, q_heads].
void add_column_sums(const full_attention_shape& shape, std::int64_t first, std::int64_t rows,
                     const float* q, const float* k, const float* lse, std::int64_t stride,
                     double* sums);

// The probabilities of one row, out [q_heads, stride], 0 where it sees nothing. lse [q_heads].
void attention_probabilities(const full_attention_shape& shape, std::int64_t position,
                             const float* q, const float* k, const float* lse, std::int64_t stride,
                             float* out);

}  // namespace kvreplay::tracer
