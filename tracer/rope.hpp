// Rotary position embedding in the "half" layout: channel i turns with channel i + dim / 2.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvreplay::tracer {

// Cosines and sines for some positions. Angles are formed in double: at position 20000 a float
// angle is off by about 1e-3.
class rotary_table {
 public:
  // inv_freq [dim / 2]
  rotary_table(std::span<const double> inv_freq, std::span<const std::int64_t> positions);

  // x [rows, heads, head_dim], rows as many as positions; rotates the first dim channels in place.
  void rotate(float* x, int heads, int head_dim) const;

 private:
  std::int64_t pairs_, rows_;
  std::vector<float> cos_, sin_;  // [rows, dim / 2]
};

}  // namespace kvreplay::tracer
