#include "tracer/linear.hpp"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tracer/blas.hpp"

namespace kvreplay::tracer {
namespace {

constexpr int tile_columns = 128;  // narrowest column tile where there is more than one

int tile_count(int outputs) { return std::max(1, outputs / tile_columns); }

// First column of tile i; tiles start at multiples of 16 and differ by at most 16 columns.
int tile_begin(int outputs, int tiles, int i) {
  if (i == tiles) return outputs;
  const std::int64_t groups = (outputs + 15) / 16;
  return static_cast<int>(groups * i / tiles * 16);
}

// x [rows, inputs] as groups of 16 rows, [groups, inputs, 16], missing rows zero.
std::vector<float> to_lanes(const float* x, std::int64_t rows, int inputs, std::int64_t stride) {
  const std::int64_t groups = (rows + lanes - 1) / lanes;
  std::vector<float> out(static_cast<size_t>(groups * inputs * lanes), 0.0f);
  tbb::parallel_for(std::int64_t{0}, groups, [&](std::int64_t g) {
    float* group = out.data() + g * inputs * lanes;
    for (std::int64_t lane = 0; lane < std::min<std::int64_t>(lanes, rows - g * lanes); ++lane) {
      const float* row = x + (g * lanes + lane) * stride;
      for (std::int64_t i = 0; i < inputs; ++i) group[i * lanes + lane] = row[i];
    }
  });
  return out;
}

// Columns begin .. begin + columns - 1 of all rows.
void multiply_tile(const linear_view& layer, int begin, int columns, const float* x_lanes,
                   std::int64_t rows, float* y) {
  const std::int64_t stride = layer.stride == 0 ? layer.inputs : layer.stride;
  std::vector<float> out(static_cast<size_t>(columns * lanes));
  for (std::int64_t first = 0; first < rows; first += lanes) {
    multiply_lanes(columns, layer.inputs, layer.weight + begin * stride, stride,
                   x_lanes + first * layer.inputs, out.data());
    for (std::int64_t lane = 0; lane < std::min<std::int64_t>(lanes, rows - first); ++lane) {
      float* row = y + (first + lane) * layer.outputs + begin;
      for (std::int64_t c = 0; c < columns; ++c)
        row[c] = out[static_cast<size_t>(c * lanes + lane)];
      for (int c = 0; layer.bias != nullptr && c < columns; ++c) row[c] += layer.bias[begin + c];
    }
  }
}

float gelu_tanh(float x) {
  constexpr float root = 0.7978845608028654f;  // sqrt(2 / pi)
  return 0.5f * x * (1.0f + std::tanh(root * (x + 0.044715f * x * x * x)));
}

// y [rows, n] = activation(gate) * up, from gate_up [rows, 2 n].
template <class Activation>
void act_gate(const float* gate_up, std::int64_t rows, int n, float* y, Activation activation) {
  tbb::parallel_for(std::int64_t{0}, rows, [&](std::int64_t r) {
    const float* gate = gate_up + r * 2 * n;
    const float* up = gate + n;
    float* out = y + r * n;
    for (int i = 0; i < n; ++i) out[i] = activation(gate[i]) * up[i];
  });
}

}  // namespace

void apply_linear(const linear_view& layer, const float* x, std::int64_t rows, float* y,
                  std::int64_t x_stride) {
  const auto x_lanes = to_lanes(x, rows, layer.inputs, x_stride == 0 ? layer.inputs : x_stride);
  const int tiles = tile_count(layer.outputs);
  tbb::parallel_for(0, tiles, [&](int i) {
    const int begin = tile_begin(layer.outputs, tiles, i);
    const int end = tile_begin(layer.outputs, tiles, i + 1);
    multiply_tile(layer, begin, end - begin, x_lanes.data(), rows, y);
  });
}

void rms_norm(std::span<const float> weight, double eps, const float* x, std::int64_t rows,
              float* y) {
  const auto n = static_cast<std::int64_t>(weight.size());
  tbb::parallel_for(std::int64_t{0}, rows, [&](std::int64_t r) {
    const float* in = x + r * n;
    float* out = y + r * n;
    double squares = 0;
    for (std::int64_t i = 0; i < n; ++i) squares += static_cast<double>(in[i]) * in[i];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) + eps);
    for (std::int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<float>(in[i] * scale * weight[static_cast<size_t>(i)]);
    }
  });
}

void layer_norm(std::span<const float> weight, std::span<const float> bias, double eps,
                const float* x, std::int64_t rows, float* y) {
  const auto n = static_cast<std::int64_t>(weight.size());
  tbb::parallel_for(std::int64_t{0}, rows, [&](std::int64_t r) {
    const float* in = x + r * n;
    float* out = y + r * n;
    double sum = 0, squares = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += in[i];
    const double mean = sum / static_cast<double>(n);
    for (std::int64_t i = 0; i < n; ++i) squares += (in[i] - mean) * (in[i] - mean);
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) + eps);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto c = static_cast<size_t>(i);
      out[i] = static_cast<float>((in[i] - mean) * scale * weight[c] + bias[c]);
    }
  });
}

void silu_gate(const float* gate_up, std::int64_t rows, int n, float* y) {
  act_gate(gate_up, rows, n, y, [](float x) { return x / (1.0f + std::exp(-x)); });
}

void gelu_gate(const float* gate_up, std::int64_t rows, int n, float* y) {
  act_gate(gate_up, rows, n, y, gelu_tanh);
}

void gelu(const float* x, std::int64_t rows, int n, float* y) {
  tbb::parallel_for(std::int64_t{0}, rows, [&](std::int64_t r) {
    for (std::int64_t i = r * n; i < (r + 1) * n; ++i) y[i] = gelu_tanh(x[i]);
  });
}

}  // namespace kvreplay::tracer
