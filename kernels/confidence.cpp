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
  constexpr std::int64_t block = 1024;
  float e[block], de[block];
  shifted_sums total;
  for (std::int64_t begin = 0; begin < n; begin += block) {
    const std::int64_t count = std::min(block, n - begin);
    std::copy_n(x + begin, count, e);
    exp_in_place(e, count, top);
    total.z += row_sum(e, count);
    for (std::int64_t i = 0; i < count; ++i) {
      const float d = x[begin + i] - top;
      de[i] = (d < -200.0F ? -200.0F : d) * e[i];  // e^d is 0 there, and 0 times -inf would not be
    }
    total.t += row_sum(de, count);
  }
  return total;
}

}  // namespace

logit_summary summarise_logits(std::span<const float> logits) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  check_logits(logits);
  const auto n = static_cast<std::int64_t>(logits.size());
  const float top = row_max(logits.data(), n, -infinity);
  if (n == 0 || top == -infinity) {
    throw std::domain_error(n == 0 ? "there are no logits" : "all logits are -inf");
  }
  const std::int64_t argmax = std::find(logits.begin(), logits.end(), top) - logits.begin();
  const float second = row_max(logits.data() + argmax + 1, n - argmax - 1,
                               row_max(logits.data(), argmax, -infinity));
  const shifted_sums sums = sum_shifted(logits.data(), n, top);
  logit_summary result;
  result.entropy = static_cast<float>(std::max(0.0, std::log(sums.z) - sums.t / sums.z));
  result.margin = second == -infinity ? infinity : top - second;
  result.top = static_cast<float>(1.0 / sums.z);
  result.log_z = std::log(sums.z);
  result.lse = static_cast<float>(static_cast<double>(top) + result.log_z);
  result.argmax = static_cast<int>(argmax);
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
