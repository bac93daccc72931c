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

}  // namespace

void multiply_lanes(int outputs, int inner, const float* a, std::int64_t stride_a, const float* b,
                    float* c) {
  hold_to_one_thread();
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, outputs, lanes, inner, 1.0f, a,
              static_cast<int>(stride_a), b, lanes, 0.0f, c, lanes);
}

void multiply_lanes_transposed(int outputs, int inner, const float* a, std::int64_t stride_a,
                               const float* b, float* c) {
  hold_to_one_thread();
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, outputs, lanes, inner, 1.0f, a,
              static_cast<int>(stride_a), b, lanes, 0.0f, c, lanes);
}

}  // namespace kvreplay::tracer
