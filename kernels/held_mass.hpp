// held_mass: how much of a query's recorded attention lies on given positions.
#pragma once

#include <cstdint>
#include <span>

namespace kvreplay::kernels {

// out[g] = sum over `positions` of e^{softmax_scale * q_g . k_i - lse[g]}, summed in double.
//   q [group, dim]; k: key i starts at k + i * key_stride; lse [group], natural log; out [group]
// Positions may come in any order; the sum is taken in theirs.
void held_mass(const float* q, int group, int dim, float softmax_scale, const float* k,
               std::int64_t key_stride, std::span<const std::int32_t> positions, const float* lse,
               double* out);

}  // namespace kvreplay::kernels
