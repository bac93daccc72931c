// Linear layers and normalisation over blocks of rows. A row's bits depend on that row alone.
#pragma once

#include <cstdint>
#include <span>

namespace kvreplay::tracer {

// A weight matrix as Hugging Face stores it: weight [outputs, inputs], rows `stride` floats apart.
struct linear_view {
  int outputs = 0, inputs = 0;
  const float* weight = nullptr;
  const float* bias = nullptr;  // [outputs] or null
  std::int64_t stride = 0;      // 0: inputs
};

// y [rows, outputs] = x [rows, inputs] * weight^T + bias. x's rows may lie `x_stride` floats apart
// (0: inputs). Rows are multiplied 16 at a time (blas.hpp), output columns in fixed tiles.
void apply_linear(const linear_view& layer, const float* x, std::int64_t rows, float* y,
                  std::int64_t x_stride = 0);

// y = x / sqrt(mean(x^2) + eps) * weight, each row on its own, sums in double; x, y [rows, n].
void rms_norm(std::span<const float> weight, double eps, const float* x, std::int64_t rows,
              float* y);

// y = (x - mean) / sqrt(variance + eps) * weight + bias, otherwise the same.
void layer_norm(std::span<const float> weight, std::span<const float> bias, double eps,
                const float* x, std::int64_t rows, float* y);

// y [rows, n] = silu(gate) * up, from gate_up [rows, 2 n] (gate first).
void silu_gate(const float* gate_up, std::int64_t rows, int n, float* y);

// The same with GELU in its tanh form (gelu_new, gelu_pytorch_tanh).
void gelu_gate(const float* gate_up, std::int64_t rows, int n, float* y);

// y [rows, n] = gelu(x), tanh form.
void gelu(const float* x, std::int64_t rows, int n, float* y);

}  // namespace kvreplay::tracer
