// IEEE binary16 <-> float in our own code: the HDF5 library's narrowing is wrong below 2^-14.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace kvreplay::traces {

__extension__ using binary16 = _Float16;

inline float half_to_float(std::uint16_t bits) {
  return static_cast<float>(std::bit_cast<binary16>(bits));
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
