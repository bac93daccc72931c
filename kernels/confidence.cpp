#include "kernels/confidence.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "kernels/numerics.hpp"

namespace kvreplay::kernels {
namespace {

// Throws for NaN and +inf.
void check_logits(std::span<const float> logits) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  std::uint32_t bad = 0;
  for (const float x : logits) bad |= x < infinity ? 0u : 1u;
  if (bad == 0) return;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (logits[i] < infinity) continue;
    throw std::domain_error(
        fmt::format("logit {} is {}", i, std::isnan(logits[i]) ? "nan" : "+inf"));
  }
}

// Sums over tokens of e^d and d e^d with d = x - top <= 0. Every term of the second sum is <= 0, so
// the entropy ln Z - T / Z loses nothing to a common offset of the logits.
struct shifted_sums {
  double z = 0, t = 0;
};

shifted_sums sum_shifted(const float* x, std::int64_t n, float top) {
  constexpr int lanes = 16;
  constexpr std::int64_t block =
      64 * lanes;  // few enough terms a lane for float to be exact enough
  shifted_sums total;
  for (std::int64_t begin = 0; begin < n; begin += block) {
    const std::int64_t end = std::min(n, begin + block);
    float z[lanes] = {};
    float t[lanes] = {};
    const auto add = [&](std::int64_t i, int j) {
      const float d = x[i] - top < -200.0F ? -200.0F : x[i] - top;  // e^d is 0 there
      const float e = exp_float(d);
      z[j] += e;
      t[j] += d * e;
    };
    std::int64_t i = begin;
    for (; i + lanes <= end; i += lanes) {
      for (int j = 0; j < lanes; ++j) add(i + j, j);
    }
    for (int j = 0; i < end; ++i, ++j) add(i, j);
    for (int j = 0; j < lanes; ++j) {
      total.z += static_cast<double>(z[j]);
      total.t += static_cast<double>(t[j]);
    }
  }
  return total;
}

}  // namespace

logit_summary summarise_logits(std::span<const float> logits) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  check_logits(logits);
  const auto n = static_cast<std::int64_t>(logits.size());
  const auto largest = std::max_element(logits.begin(), logits.end());  // the first of equal ones
  if (n == 0 || *largest == -infinity) {
    throw std::domain_error(n == 0 ? "there are no logits" : "all logits are -inf");
  }
  const float top = *largest;
  float second = -infinity;
  for (auto it = logits.begin(); it != logits.end(); ++it) {
    if (it != largest && *it > second) second = *it;
  }
  const shifted_sums sums = sum_shifted(logits.data(), n, top);
  logit_summary result;
  result.entropy = static_cast<float>(std::max(0.0, std::log(sums.z) - sums.t / sums.z));
  result.margin = second == -infinity ? infinity : top - second;
  result.top = static_cast<float>(1.0 / sums.z);
  result.lse = static_cast<float>(static_cast<double>(top) + std::log(sums.z));
  result.argmax = static_cast<int>(largest - logits.begin());
  return result;
}

double confidence(float entropy, float margin, float top, int vocab_size,
                  const confidence_weights& weights) {
  if (vocab_size < 1) {
    throw std::domain_error(fmt::format("vocab_size is {}, expected at least 1", vocab_size));
  }
  if (vocab_size == 1) return 1.0;
  const double spread = static_cast<double>(entropy) / std::log(static_cast<double>(vocab_size));
  const double lead = 1.0 / (1.0 + std::exp(-static_cast<double>(margin)));
  return weights.entropy * (1.0 - spread) + weights.margin * lead +
         weights.top * static_cast<double>(top);
}

}  // namespace kvreplay::kernels
