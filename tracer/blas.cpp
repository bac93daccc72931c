#include "tracer/blas.hpp"

#include <cblas.h>

namespace kvreplay::tracer {
namespace {

// OpenBLAS splits large products over its own threads, which changes the order of sums.
void hold_to_one_thread() {
  static const bool held = [] {
    openblas_set_num_threads(1);
    return true;
  }();
  static_cast<void>(held);
}

void sgemm(const product_shape& shape, CBLAS_TRANSPOSE transpose_b, const float* a, const float* b,
           float* c) {
  hold_to_one_thread();
  cblas_sgemm(CblasRowMajor, CblasNoTrans, transpose_b, shape.rows, shape.columns, shape.inner,
              1.0f, a, static_cast<int>(shape.stride_a), b, static_cast<int>(shape.stride_b), 0.0f,
              c, static_cast<int>(shape.stride_c));
}

}  // namespace

void multiply_transposed(const product_shape& shape, const float* a, const float* b, float* c) {
  sgemm(shape, CblasTrans, a, b, c);
}

void multiply(const product_shape& shape, const float* a, const float* b, float* c) {
  sgemm(shape, CblasNoTrans, a, b, c);
}

}  // namespace kvreplay::tracer
