#include "tracer/sampling.hpp"

#include <algorithm>
#include <cmath>

namespace kvreplay::tracer {
namespace {

std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

double uniform_at(std::uint64_t seed, std::int64_t position) {
  const std::uint64_t bits = mix(mix(seed) + static_cast<std::uint64_t>(position));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

std::int32_t choose_token(std::span<const float> logits, double temperature, double uniform) {
  const auto best = std::max_element(logits.begin(), logits.end());
  const auto argmax = static_cast<std::int32_t>(best - logits.begin());
  if (temperature == 0) return argmax;
  const auto weight = [&](float x) { return std::exp((double{x} - *best) / temperature); };
  double total = 0;
  for (const float x : logits) total += weight(x);
  double cumulative = 0;
  for (size_t id = 0; id < logits.size(); ++id) {
    cumulative += weight(logits[id]);
    if (cumulative > uniform * total) return static_cast<std::int32_t>(id);
  }
  return argmax;  // reached only where rounding keeps the last sum at uniform * total
}

}  // namespace kvreplay::tracer
