#include "kernels/held_mass.hpp"

#include <vector>

#include "kernels/inner_loops.hpp"

namespace kvreplay::kernels {

void held_mass(const float* q, int group, int dim, float softmax_scale, const float* k,
               std::int64_t key_stride, std::span<const std::int32_t> positions, const float* lse,
               double* out) {
  const auto n = static_cast<std::int64_t>(positions.size());
  const auto& loops = active_loops();
  std::vector<float> scaled(q, q + std::int64_t{group} * dim);
  for (float& x : scaled) x *= softmax_scale;
  std::vector<float> scores(static_cast<std::size_t>(group * n));
  loops.score_float({scaled.data(),
                     group,
                     dim,
                     k,
                     nullptr,
                     n,
                     scores.data(),
                     n,
                     {},
                     positions.data(),
                     key_stride});
  for (int g = 0; g < group; ++g) {
    float* row = scores.data() + g * n;
    loops.exponentials(row, n, lse[g]);
    out[g] = 0;
    for (std::int64_t i = 0; i < n; ++i) out[g] += static_cast<double>(row[i]);
  }
}

}  // namespace kvreplay::kernels
