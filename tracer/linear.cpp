#include "tracer/linear.hpp"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tracer/blas.hpp"

namespace kvreplay::tracer {
namespace {

constexpr std::int64_t row_group = 16;   // below this OpenBLAS' edge kernels change a row's bits
constexpr std::int64_t row_block = 128;  // rows of one product
constexpr int tile_columns = 128;        // narrowest column tile where there is more than one
// OpenBLAS takes small-matrix kernels below about 10^6 multiply-adds on some processors. Such tiles
// are always multiplied in one shape, so that the choice of kernel cannot depend on the row count.
constexpr std::int64_t small_product = 1 << 20;

int tile_count(int outputs) { return std::max(1, outputs / tile_columns); }

// First column of tile i; tiles start at multiples of 16 and differ by at most 16 columns.
int tile_begin(int outputs, int tiles, int i) {
  if (i == tiles) return outputs;
  const std::int64_t groups = (outputs + 15) / 16;
  return static_cast<int>(groups * i / tiles * 16);
}

void add_bias(const float* bias, std::int64_t rows, int columns, float* y, std::int64_t stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int c = 0; c < columns; ++c) y[r * stride + c] += bias[c];
  }
}

// The last rows % 16 rows of a tile, through zero-padded copies.
void multiply_tail(product_shape shape, std::int64_t rows, const float* x, const float* weight,
                   float* y) {
  std::vector<float> padded(static_cast<size_t>(row_group * shape.inner), 0.0f);
  std::vector<float> out(static_cast<size_t>(row_group * shape.columns));
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(x + r * shape.stride_a, shape.inner, padded.data() + r * shape.inner);
  }
  const std::int64_t stride_y = shape.stride_c;
  shape.rows = static_cast<int>(row_group);
  shape.stride_a = shape.inner;
  shape.stride_c = shape.columns;
  multiply_transposed(shape, padded.data(), weight, out.data());
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(out.data() + r * shape.columns, shape.columns, y + r * stride_y);
  }
}

// All rows of one column tile; shape.rows is set here.
void multiply_tile(product_shape shape, std::int64_t rows, const float* x, const float* weight,
                   float* y) {
  const std::int64_t work = row_group * shape.columns * shape.inner;
  const std::int64_t step = work < small_product ? row_group : row_block;
  const std::int64_t whole = rows / row_group * row_group;
  for (std::int64_t r = 0; r < whole; r += step) {
    shape.rows = static_cast<int>(std::min(step, whole - r));
    multiply_transposed(shape, x + r * shape.stride_a, weight, y + r * shape.stride_c);
  }
  if (whole < rows) {
    multiply_tail(shape, rows - whole, x + whole * shape.stride_a, weight,
                  y + whole * shape.stride_c);
  }
}

}  // namespace

void apply_linear(const linear_view& layer, const float* x, std::int64_t rows, float* y,
                  std::int64_t x_stride) {
  const int tiles = tile_count(layer.outputs);
  const std::int64_t stride = layer.stride == 0 ? layer.inputs : layer.stride;
  tbb::parallel_for(0, tiles, [&](int i) {
    const int begin = tile_begin(layer.outputs, tiles, i);
    product_shape shape;
    shape.columns = tile_begin(layer.outputs, tiles, i + 1) - begin;
    shape.inner = layer.inputs;
    shape.stride_a = x_stride == 0 ? layer.inputs : x_stride;
    shape.stride_b = stride;
    shape.stride_c = layer.outputs;
    multiply_tile(shape, rows, x, layer.weight + begin * stride, y + begin);
    if (layer.bias != nullptr) {
      add_bias(layer.bias + begin, rows, shape.columns, y + begin, shape.stride_c);
    }
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

void silu_gate(const float* gate_up, std::int64_t rows, int n, float* y) {
  tbb::parallel_for(std::int64_t{0}, rows, [&](std::int64_t r) {
    const float* gate = gate_up + r * 2 * n;
    const float* up = gate + n;
    float* out = y + r * n;
    for (int i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  });
}

}  // namespace kvreplay::tracer
