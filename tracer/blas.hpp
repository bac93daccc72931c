// The matrix products the tracer is made of, on OpenBLAS held to one thread: parallelism comes from
// oneTBB over fixed tiles, so that results do not depend on thread counts.
//
// A row's bits must not depend on the rows computed with it, and OpenBLAS does not promise that:
// its kernels sum the rows of a product in another order at other places, and other sizes take
// other kernels. What holds is one case: 16 rows as the narrow, contiguous side of a product of one
// shape. Everything is therefore computed for 16 rows ("lanes") at a time, zero-padded where fewer
// are left; linear_test.cpp shows that all lanes of the installed library agree bit for bit.
#pragma once

#include <cstdint>

namespace kvreplay::tracer {

inline constexpr int lanes = 16;

// c [outputs, 16] = a [outputs, inner] * b [inner, 16]; rows of a lie stride_a floats apart.
void multiply_lanes(int outputs, int inner, const float* a, std::int64_t stride_a, const float* b,
                    float* c);

// c [outputs, 16] = a [inner, outputs]^T * b [inner, 16]
void multiply_lanes_transposed(int outputs, int inner, const float* a, std::int64_t stride_a,
                               const float* b, float* c);

}  // namespace kvreplay::tracer
