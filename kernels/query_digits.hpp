// A query row as 15-bit integers in two digits, so that INT8 keys meet it in integer arithmetic:
//   q[c] ~ scale * (128 * hi[c] + lo[c])     score = scale * (K . q) exactly as an int32
// Host and device code share these functions; every operation is one IEEE operation (no contraction
// possible), so that all of them get the same digits and bit-identical integer scores. They are
// static: a copy compiled for one instruction set must never serve the whole program.
//
// Ranges, for dim <= 256 and codes k in [-128, 127]:
//   hi in [-127, 127], lo in [-64, 63], |128 hi + lo| <= 16256
//   |K . q| <= 256 * 128 * 16256 < 2^29 (532 676 608)
//   with k + 128 as an unsigned byte: 128 * (hi . u) + lo . u <= 256 * 255 * 16320 < 2^30, and its
//   correction |128 * sum(128 hi + lo)| < 2^29: no int32 overflows on any way there.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KVREPLAY_HOST_DEVICE __host__ __device__
#else
#define KVREPLAY_HOST_DEVICE
#endif

namespace kvreplay::kernels {

inline constexpr int digit_base = 128;
inline constexpr int largest_digit_value = 127 * digit_base;  // 16256
inline constexpr int digit_row_size = 256;                    // the largest head_dim

// Rows of smaller magnitude count as zero: their scale would leave the normal range.
inline constexpr float smallest_digit_range = 0x1p-100F;

struct digit_row {
  float scale;       // 0 for a row of zeros, NaN where the query is not finite
  std::int32_t sum;  // of 128 * hi + lo over the row
  // Zero beyond the row's channels.
  alignas(64) std::int8_t hi[digit_row_size];
  alignas(64) std::int8_t lo[digit_row_size];
};

// What one step of the integers is worth for a row whose largest magnitude is `absmax`.
KVREPLAY_HOST_DEVICE static inline float digit_scale(float absmax) {
  if (absmax < smallest_digit_range) return 0.0F;
  if (!(absmax <= 3.4028234e38F)) return __builtin_nanf("");
  return absmax / static_cast<float>(largest_digit_value);
}

// The integer nearest to x / scale, ties to even; 0 where the scale is 0 or NaN.
KVREPLAY_HOST_DEVICE static inline std::int32_t digit_value(float x, float scale) {
  if (!(scale > 0)) return 0;
  constexpr float magic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const float quotient = x / scale;
  const float shifted = quotient + magic;
  return static_cast<std::int32_t>(shifted - magic);
}

KVREPLAY_HOST_DEVICE static inline std::int32_t high_digit(std::int32_t value) {
  return (value + digit_base / 2) >> 7;
}
KVREPLAY_HOST_DEVICE static inline std::int32_t low_digit(std::int32_t value) {
  return value - digit_base * high_digit(value);
}

// Splits q [dim], dim <= 256.
KVREPLAY_HOST_DEVICE static inline void split_query(const float* q, int dim, digit_row& out) {
  float absmax = 0;
  bool finite = true;
  for (int c = 0; c < dim; ++c) {
    const float magnitude = q[c] < 0 ? -q[c] : q[c];
    finite = finite && magnitude <= 3.4028234e38F;
    absmax = absmax < magnitude ? magnitude : absmax;
  }
  out.scale = finite ? digit_scale(absmax) : __builtin_nanf("");
  out.sum = 0;
  for (int c = 0; c < digit_row_size; ++c) {
    const std::int32_t value = c < dim ? digit_value(q[c], out.scale) : 0;
    out.sum += value;
    out.hi[c] = static_cast<std::int8_t>(high_digit(value));
    out.lo[c] = static_cast<std::int8_t>(low_digit(value));
  }
}

// K . q of one row of codes. 128 * (hi . k) + (lo . k), in integers.
KVREPLAY_HOST_DEVICE static inline std::int32_t digit_score(const digit_row& query,
                                                            const std::int8_t* codes, int dim) {
  std::int32_t high = 0, low = 0;
  for (int c = 0; c < dim; ++c) {
    high += std::int32_t{query.hi[c]} * codes[c];
    low += std::int32_t{query.lo[c]} * codes[c];
  }
  return digit_base * high + low;
}

}  // namespace kvreplay::kernels
