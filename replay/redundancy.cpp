#include "replay/redundancy.hpp"

#include <algorithm>
#include <cmath>

namespace kvreplay::replay {

std::vector<double> redundancies(std::span<const float> keys, std::size_t dim) {
  constexpr float near_duplicate = 0.5F;
  const size_t n = keys.size() / dim;
  std::vector<float> unit(n * dim), across(n * dim);  // [n, dim] and [dim, n]
  for (size_t i = 0; i < n; ++i) {
    double norm2 = 0;
    for (size_t c = 0; c < dim; ++c) {
      norm2 += static_cast<double>(keys[i * dim + c]) * keys[i * dim + c];
    }
    const double norm = std::sqrt(norm2) + 1e-8;
    for (size_t c = 0; c < dim; ++c) {
      unit[i * dim + c] = across[c * n + i] = static_cast<float>(keys[i * dim + c] / norm);
    }
  }
  std::vector<double> mean(n, 0.0);
  std::vector<float> cosine(n);
  for (size_t i = 0; i < n; ++i) {
    std::fill(cosine.begin(), cosine.end(), 0.0F);
    for (size_t c = 0; c < dim; ++c) {
      const float x = unit[i * dim + c];
      const float* row = &across[c * n];
      for (size_t j = 0; j < n; ++j) cosine[j] += x * row[j];
    }
    cosine[i] = 0;
    const auto newest =
        std::find_if(cosine.rbegin(), cosine.rend(), [](float x) { return x > near_duplicate; });
    if (newest != cosine.rend()) *newest = 0;
    for (size_t j = 0; j < n; ++j) mean[j] += cosine[j];
  }
  double top = -INFINITY, sum = 0;
  for (double& m : mean) top = std::max(top, m /= static_cast<double>(n));
  for (double& m : mean) sum += m = std::exp(m - top);
  for (double& m : mean) m /= sum;
  return mean;
}

}  // namespace kvreplay::replay
