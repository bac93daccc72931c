#include "replay/projection.hpp"

#include <cblas.h>

#include <cmath>

namespace kvreplay::replay {

std::vector<projected_row> project(const projection_shape& shape, std::span<const float> wo,
                                   std::span<const float> x, std::int64_t rows) {
  // The callers are parallel already; one BLAS thread each keeps results independent of how many.
  openblas_set_num_threads(1);
  const auto hidden = static_cast<size_t>(shape.hidden_size);
  const auto n = static_cast<size_t>(rows);
  std::vector<float> head(n * hidden), total(n * hidden, 0.0F);
  std::vector<projected_row> out(n);
  for (int h = 0; h < shape.q_heads; ++h) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, static_cast<int>(rows),
                shape.hidden_size, shape.value_dim, 1.0F,
                x.data() + static_cast<std::int64_t>(h) * shape.value_dim,
                shape.q_heads * shape.value_dim,
                wo.data() + static_cast<std::int64_t>(h) * shape.value_dim * shape.hidden_size,
                shape.hidden_size, 0.0F, head.data(), shape.hidden_size);
    for (size_t r = 0; r < n; ++r) {
      double sum = 0;
      for (size_t c = 0; c < hidden; ++c) {
        const float y = head[r * hidden + c];
        sum += std::fabs(y);
        total[r * hidden + c] += y;
      }
      out[r].head_l1_sum += sum;
    }
  }
  for (size_t r = 0; r < n; ++r) {
    for (size_t c = 0; c < hidden; ++c) {
      const double y = total[r * hidden + c];
      out[r].norm2 += y * y;
      out[r].l1 += std::fabs(y);
    }
  }
  return out;
}

}  // namespace kvreplay::replay
