#include "kernels/reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <stdexcept>

namespace kvreplay::kernels {

reference_result reference_attend(std::span<const double> q, std::span<const double> k,
                                  std::span<const double> v, int value_dim, double softmax_scale,
                                  const double* sink) {
  const std::size_t channels = q.size();
  const auto values = static_cast<std::size_t>(value_dim);
  if (channels == 0 || value_dim < 1 || k.size() % channels != 0 ||
      v.size() != k.size() / channels * values) {
    throw std::invalid_argument("reference_attend: k and v do not match head_dim and value_dim");
  }
  const std::size_t n = k.size() / channels;
  reference_result result;
  result.o.assign(values, 0.0);
  result.mass.assign(n, 0.0);
  result.lse = sink != nullptr ? *sink : -std::numeric_limits<double>::infinity();
  if (n == 0) return result;

  for (std::size_t i = 0; i < n; ++i) {
    double s = 0;
    for (std::size_t c = 0; c < channels; ++c) s += q[c] * k[i * channels + c];
    result.mass[i] = s * softmax_scale;
  }
  double top = *std::max_element(result.mass.begin(), result.mass.end());
  if (sink != nullptr) top = std::max(top, *sink);
  double sum = sink != nullptr ? std::exp(*sink - top) : 0.0;
  for (const double s : result.mass) sum += std::exp(s - top);
  result.lse = top + std::log(sum);
  for (std::size_t i = 0; i < n; ++i) {
    result.mass[i] = std::exp(result.mass[i] - result.lse);
    for (std::size_t c = 0; c < values; ++c) result.o[c] += result.mass[i] * v[i * values + c];
  }
  return result;
}

}  // namespace kvreplay::kernels
