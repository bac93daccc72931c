#include "tracer/rope.hpp"

#include <cmath>
#include <numbers>

#include "tracer/config.hpp"

namespace kvreplay::tracer {

rotary_table::rotary_table(std::span<const double> inv_freq,
                           std::span<const std::int64_t> positions)
    : pairs_(static_cast<std::int64_t>(inv_freq.size())),
      rows_(static_cast<std::int64_t>(positions.size())) {
  cos_.reserve(positions.size() * inv_freq.size());
  sin_.reserve(positions.size() * inv_freq.size());
  for (const std::int64_t position : positions) {
    for (const double frequency : inv_freq) {
      const double angle = static_cast<double>(position) * frequency;
      cos_.push_back(static_cast<float>(std::cos(angle)));
      sin_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
}

void rotary_table::rotate(float* x, int heads, int head_dim) const {
  for (std::int64_t r = 0; r < rows_; ++r) {
    const float* c = cos_.data() + r * pairs_;
    const float* s = sin_.data() + r * pairs_;
    for (int h = 0; h < heads; ++h) {
      float* first = x + (r * heads + h) * head_dim;
      float* second = first + pairs_;
      for (std::int64_t i = 0; i < pairs_; ++i) {
        const float a = first[i], b = second[i];
        first[i] = a * c[i] - b * s[i];
        second[i] = b * c[i] + a * s[i];
      }
    }
  }
}

const rope_config& rope_of(const model_config& config, int layer) {
  const bool local = config.local_rope && config.window[static_cast<size_t>(layer)] > 0;
  return local ? *config.local_rope : config.rope;
}

// Llama 3's scaling as transformers' modeling_rope_utils (_compute_llama3_parameters) defines it:
// long wavelengths are divided by `factor`, short ones kept, those between interpolated.
std::vector<double> inverse_frequencies(const rope_config& rope) {
  std::vector<double> frequencies;
  for (int i = 0; i < rope.dim / 2; ++i) {
    double frequency = std::pow(rope.theta, -2.0 * i / rope.dim);
    if (rope.scaling == "linear") frequency /= rope.factor;
    if (rope.scaling == "llama3") {
      // How often the original context length holds this wavelength.
      const double turns =
          rope.original_max_position_embeddings * frequency / (2 * std::numbers::pi);
      if (turns < rope.low_freq_factor) {
        frequency /= rope.factor;
      } else if (turns <= rope.high_freq_factor) {
        const double smooth =
            (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
        frequency = (1 - smooth) * frequency / rope.factor + smooth * frequency;
      }
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

}  // namespace kvreplay::tracer
