// projection: an attention error carried through the output projection, for residual_rel_l2,
// output_l1 and head_l1.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay::replay {

struct projection_shape {
  int q_heads = 0, value_dim = 0, hidden_size = 0;
};

struct projected_row {
  double norm2 = 0;             // ||sum_h x_h W_O^h||_2^2
  double l1 = 0;                // ||sum_h x_h W_O^h||_1
  std::vector<double> head_l1;  // [q_heads] ||x_h W_O^h||_1
};

// The output projection of a trace, wo [q_heads, value_dim, hidden_size], as `project` reads it:
// [tiles of 16 outputs, q_heads, value_dim, 16], zero beyond hidden_size.
std::vector<float> output_weights(const projection_shape& shape, std::span<const float> wo);

// x [rows, q_heads, value_dim], weights as output_weights gives them -> one result per row. A row's
// bits depend on that row alone (score_tile in kernels/inner_loops.hpp; a BLAS product's depend on
// the rows beside it), so blocks may be cut anywhere.
std::vector<projected_row> project(const projection_shape& shape, std::span<const float> weights,
                                   std::span<const float> x, std::int64_t rows);

// L1 norm of each value through every query head's slice of the output projection (CriticalKV):
// v [rows, kv_heads, value_dim] -> [rows, q_heads].
std::vector<float> value_norms(const projection_shape& shape, std::span<const float> weights,
                               int kv_heads, std::span<const float> v, std::int64_t rows);

}  // namespace kvreplay::replay
