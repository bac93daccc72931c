#include "reports/bootstrap.hpp"

#include <algorithm>
#include <cmath>

namespace kvreplay::reports {
namespace {

// What is drawn as a whole: the sum of deviations from a common centre, and how many.
struct unit {
  double sum = 0;
  double count = 0;
};

// A random number that is a function of its place alone: SplitMix64's finaliser (Steele, Lea and
// Flood 2014) over a counter.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

std::size_t draw(std::uint64_t seed, std::size_t resample, std::size_t index, std::size_t n) {
  const std::uint64_t bits = mix(mix(mix(seed) + resample) + index) >> 32;
  return static_cast<std::size_t>((bits * static_cast<std::uint64_t>(n)) >> 32);
}

std::vector<unit> cut(std::span<const std::vector<double>> sequences, std::size_t length,
                      double centre) {
  std::vector<unit> units;
  for (const std::vector<double>& values : sequences) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i == 0 || (length > 0 && i % length == 0)) units.emplace_back();
      units.back().sum += values[i] - centre;
      units.back().count += 1;
    }
  }
  return units;
}

double nearest_rank(const std::vector<double>& sorted, double share) {
  const double rank = std::ceil(share * static_cast<double>(sorted.size()) - 1e-9);
  const double last = static_cast<double>(sorted.size());
  return sorted[static_cast<std::size_t>(std::clamp(rank, 1.0, last)) - 1];
}

}  // namespace

std::optional<std::pair<double, double>> bootstrap_mean(
    std::span<const std::vector<double>> sequences, const bootstrap_options& options) {
  std::size_t used = 0;
  std::optional<double> centre;
  for (const std::vector<double>& values : sequences) {
    used += !values.empty();
    for (const double value : values) {
      if (!std::isfinite(value)) return std::nullopt;
      // Deviations from one of the values: constant data gives exactly that value.
      if (!centre) centre = value;
    }
  }
  if (!centre || options.resamples == 0) return std::nullopt;
  const std::size_t length =
      used >= options.min_sequences ? 0 : std::max<std::size_t>(options.block, 1);
  const std::vector<unit> units = cut(sequences, length, *centre);
  if (units.size() < 2) return std::nullopt;

  std::vector<double> means(options.resamples);
  for (std::size_t r = 0; r < means.size(); ++r) {
    unit total;
    for (std::size_t i = 0; i < units.size(); ++i) {
      const unit& drawn = units[draw(options.seed, r, i, units.size())];
      total.sum += drawn.sum;
      total.count += drawn.count;
    }
    means[r] = *centre + total.sum / total.count;
  }
  std::sort(means.begin(), means.end());
  const double tail = (1 - options.level) / 2;
  return std::pair(nearest_rank(means, tail), nearest_rank(means, 1 - tail));
}

}  // namespace kvreplay::reports
