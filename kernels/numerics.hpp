// Small loops that several operations share, written so that the compiler vectorises them at any
// instruction set: fixed lanes, no branch on data. Lane counts are part of the result's bits, so a
// sum is the same in every build.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvreplay::kernels {

// Where maxima start: finite, so that no (-inf) - (-inf) can arise.
inline constexpr float very_negative = -3e38F;

// Round to nearest, ties to even, for |x| < 2^22: adding 1.5 * 2^23 leaves the integer in the low
// mantissa bits.
inline float round_even(float x) {
  constexpr float magic = 12582912.0F;
  return (x + magic) - magic;
}

// Four floats that the compiler keeps in one register of any x86-64 (or other) machine.
using float4 [[gnu::vector_size(16)]] = float;
using bits4 [[gnu::vector_size(16)]] = std::uint32_t;

inline float4 load4(const float* p) {
  float4 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// e^x within about 2e-7 relative; exactly 0 below -87, where the result would leave the normal
// range. x = n ln 2 + r with |r| <= ln 2 / 2, then the Taylor series of e^r to degree 7 (its
// remainder is below 1e-8).
inline float4 exp4(float4 x) {
  const float4 magic = {12582912.0F, 12582912.0F, 12582912.0F, 12582912.0F};  // as in round_even
  const float4 largest = {88.0F, 88.0F, 88.0F, 88.0F};
  const float4 bounded = x > largest ? largest : x;
  const float4 shifted = bounded * 1.44269504F + magic;  // n in the low bits
  const float4 n = shifted - magic;
  const float4 r = (bounded - n * 0.693359375F) + n * 2.12194440e-4F;  // ln 2 in two parts
  float4 p = r * (1.0F / 5040) + 1.0F / 720;
  p = p * r + 1.0F / 120;
  p = p * r + 1.0F / 24;
  p = p * r + 1.0F / 6;
  p = p * r + 0.5F;
  p = p * r + 1.0F;
  p = p * r + 1.0F;
  const bits4 power = (std::bit_cast<bits4>(shifted) + 127u) << 23;  // 2^n
  const auto vanishes = x < -87.0F;                                  // all ones where true
  return std::bit_cast<float4>(std::bit_cast<bits4>(p * std::bit_cast<float4>(power)) &
                               ~std::bit_cast<bits4>(vanishes));
}

inline float exp_float(float x) { return exp4(float4{x, x, x, x})[0]; }

// out[r] = a . (row r of b), b [count, n]. Every product sum takes the same path whatever `count`.
template <int count>
inline void dot_rows(const float* a, const float* b, std::int64_t n, float* out) {
  float4 even[count] = {}, odd[count] = {};
  float rest[count] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const float4 a0 = load4(a + i), a1 = load4(a + i + 4);
    for (int r = 0; r < count; ++r) {
      even[r] += a0 * load4(b + r * n + i);
      odd[r] += a1 * load4(b + r * n + i + 4);
    }
  }
  for (; i < n; ++i) {
    for (int r = 0; r < count; ++r) rest[r] += a[i] * b[r * n + i];
  }
  for (int r = 0; r < count; ++r) {
    const float4 sum = even[r] + odd[r];
    out[r] = ((sum[0] + sum[2]) + (sum[1] + sum[3])) + rest[r];
  }
}

// The largest of x[0..n), at least `start`.
inline float row_max(const float* x, std::int64_t n, float start) {
  constexpr int lanes = 16;
  float best[lanes];
  for (float& b : best) b = start;
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int j = 0; j < lanes; ++j) best[j] = best[j] < x[i + j] ? x[i + j] : best[j];
  }
  for (int j = 0; i < n; ++i, ++j) best[j] = best[j] < x[i] ? x[i] : best[j];
  float result = best[0];
  for (const float b : best) result = result < b ? b : result;
  return result;
}

// Sum of x[0..n) in double.
inline double row_sum(const float* x, std::int64_t n) {
  constexpr int lanes = 8;
  double sum[lanes] = {};
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int j = 0; j < lanes; ++j) sum[j] += static_cast<double>(x[i + j]);
  }
  for (int j = 0; i < n; ++i, ++j) sum[j] += static_cast<double>(x[i]);
  for (int j = 1; j < lanes; ++j) sum[0] += sum[j];
  return sum[0];
}

// x[i] = e^(x[i] - shift)
inline void exp_in_place(float* x, std::int64_t n, float shift) {
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const float4 e = exp4(load4(x + i) - shift);
    std::memcpy(x + i, &e, sizeof e);
  }
  for (; i < n; ++i) x[i] = exp_float(x[i] - shift);
}

// Turns n scores into probabilities in place and returns ln of the sum of exponentials; `sink`
// (may be null) is one more score that takes part in the sum alone. n = 0: the sink, or -inf.
inline float softmax_row(float* scores, std::int64_t n, const float* sink) {
  float top = row_max(scores, n, very_negative);
  if (sink != nullptr && *sink > top) top = *sink;
  exp_in_place(scores, n, top);
  double sum = row_sum(scores, n);
  if (sink != nullptr) sum += std::exp(static_cast<double>(*sink) - static_cast<double>(top));
  const float inverse = sum > 0 ? static_cast<float>(1.0 / sum) : 0.0F;
  for (std::int64_t i = 0; i < n; ++i) scores[i] *= inverse;
  return static_cast<float>(static_cast<double>(top) + std::log(sum));
}

// True where a float is NaN or infinite, as 0 or 1 for reductions that vectorise.
inline std::uint32_t is_not_finite(float x) {
  return (std::bit_cast<std::uint32_t>(x) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
}

}  // namespace kvreplay::kernels
