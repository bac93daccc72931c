// A counter-based generator: the n-th number of a stream is a function of (seed, stream, n) alone,
// so that nothing depends on who asked before.
#pragma once

#include <cstdint>

namespace kvreplay::policies {

// Finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection with full avalanche.
constexpr std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

constexpr std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream,
                                    std::uint64_t counter) {
  constexpr std::uint64_t golden = 0x9e3779b97f4a7c15ULL;
  return mix64(mix64(mix64(seed + golden) ^ (stream + golden)) + counter * golden);
}

// 53 bits as a double in [0, 1).
constexpr double unit_interval(std::uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

}  // namespace kvreplay::policies
