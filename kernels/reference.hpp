// The double-precision reference that every implementation is checked against. Slow and plain.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay::kernels {

// One query head: q [head_dim], k [n, head_dim], v [n, value_dim] row-major; sink may be null.
struct reference_result {
  std::vector<double> o;     // [value_dim]
  std::vector<double> mass;  // [n]
  double lse = 0;            // -inf for n = 0 without a sink
};
reference_result reference_attend(std::span<const double> q, std::span<const double> k,
                                  std::span<const double> v, int value_dim, double softmax_scale,
                                  const double* sink);

}  // namespace kvreplay::kernels
