// IEEE binary16 <-> float in our own code: the HDF5 library's narrowing is wrong below 2^-14.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace kvreplay::traces {

__extension__ using binary16 = _Float16;

// Exact for every pattern. In arithmetic that loops can vectorise: the compiler's own conversion is
// a call into its library where the machine it builds for has no instruction.
inline float half_to_float(std::uint16_t bits) {
  const std::uint32_t magnitude = std::uint32_t{bits & 0x7fffu} << 13;
  const std::uint32_t sign = std::uint32_t{bits & 0x8000u} << 16;
  // 2^112 moves the exponent's bias from 15 to 127 and normalises subnormals on the way.
  const auto finite = std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const std::uint32_t special = 0u - ((0x0f7fffffu - magnitude) >> 31);  // infinities and NaN
  return std::bit_cast<float>(finite | (special & 0x7f800000u) | sign);
}

// Rounds to nearest even; what lies beyond 65504 becomes an infinity (see fits_half).
inline std::uint16_t float_to_half(float value) {
  return std::bit_cast<std::uint16_t>(static_cast<binary16>(value));
}

inline bool half_is_finite(std::uint16_t bits) { return (bits & 0x7c00u) != 0x7c00u; }
inline bool half_is_zero(std::uint16_t bits) { return (bits & 0x7fffu) == 0; }

// A finite value from 65520 on rounds to infinity.
inline bool fits_half(float value) { return std::fabs(value) < 65520.0f; }

}  // namespace kvreplay::traces
