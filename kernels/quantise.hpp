// quantise: channel scales from calibration rows, and the entries that age into the body.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

// Channel scales of a layer from `rows` rows of keys and values (all prompt positions; with fewer
// than 64 of them nothing is set here and the first age-out calibrates on all entries held then).
// hybrid: sk[c] = max over rows of the rotary pair's norm (of |k_c| where c is not paired),
// sv[c] = absmax; guarded by 2^-12 of the largest channel, 1 where all are zero. token: ones.
// channel_*: own absmax / 127 (times the margin for static). Formats without tables: no effect.
//   k [rows, kv_heads, head_dim], v [rows, kv_heads, value_dim]
void calibrate(kv_cache& cache, int layer, const float* k, const float* v, std::int64_t rows);

// Moves every tail entry with position <= step - W and position >= sinks to the body, oldest first;
// in formats with groups, as many whole groups of them as there are (groups.hpp).
// Symmetric codes in [-127, 127], round to nearest even; hybrid and token: code =
// x / (channel scale * token scale), token scale = max(2^-14, absmax / 127 rounded up to FP16).
// Throws std::domain_error naming layer, head and position for a non-finite value.
void age(kv_cache& cache, int layer, std::int32_t step);

// The FP16 scalar of a token from the largest |x / channel scale| of its row: at least 2^-14,
// rounded up, so that codes never clip.
half_bits token_scale(float absmax);

}  // namespace kvreplay::kernels
