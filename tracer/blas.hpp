// The two matrix products the tracer is made of, row-major, on OpenBLAS held to one thread:
// parallelism comes from oneTBB over fixed tiles, so that results do not depend on thread counts.
#pragma once

#include <cstdint>

namespace kvreplay::tracer {

struct product_shape {
  int rows = 0, columns = 0, inner = 0;
  std::int64_t stride_a = 0, stride_b = 0, stride_c = 0;  // in floats, from row to row
};

// c [rows, columns] = a [rows, inner] * b [columns, inner]^T
void multiply_transposed(const product_shape& shape, const float* a, const float* b, float* c);

// c [rows, columns] = a [rows, inner] * b [inner, columns]
void multiply(const product_shape& shape, const float* a, const float* b, float* c);

}  // namespace kvreplay::tracer
