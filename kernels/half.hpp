// IEEE binary16 values as raw bits, and their exact conversions.
#pragma once

#include <bit>
#include <cstdint>

namespace kvreplay::kernels {

using half_bits = std::uint16_t;

// Exact for every pattern, subnormals and non-finite values included. Written in integer and float
// arithmetic (no table, no branch that depends on data) so that loops over it vectorise.
inline float half_to_float(half_bits h) {
  const std::uint32_t magnitude = static_cast<std::uint32_t>(h & 0x7fffu) << 13;
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  // 2^112 moves the exponent bias from 15 to 127 and normalises subnormals on the way.
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const std::uint32_t finite = std::bit_cast<std::uint32_t>(scaled);
  // All ones for infinities and NaN (exponent 31). By arithmetic: a comparison would let the
  // compiler move the multiplication into a branch.
  const std::uint32_t special = 0u - ((0x0f7fffffu - magnitude) >> 31);
  return std::bit_cast<float>(finite | (special & 0x7f800000u) | sign);
}

// Round to nearest even, as the hardware does. Values beyond 65504 + half a step become infinite;
// callers that must not lose a value check with is_finite_half first.
inline half_bits float_to_half(float value) {
  return std::bit_cast<half_bits>(static_cast<_Float16>(value));
}

inline bool is_finite_half(half_bits h) { return (h & 0x7c00u) != 0x7c00u; }

}  // namespace kvreplay::kernels
