// Checks every device kernel on a real GPU against the double reference, then times attend. Needs
// the CUDA Toolkit alone. From the root of the repository:
//   nvcc -std=c++20 -O3 -arch=native -I. kernels/gpu_check/kernels_gpu_check.cu \
//     kernels/reference.cpp -o kernels_gpu_check
// Exit code 0: all checks passed; 1: a check failed or the device did; 2: no usable device.
#include <cstdio>
#include <exception>

#include "kernels/gpu_check/check_attend.hpp"
#include "kernels/gpu_check/check_cache.hpp"
#include "kernels/gpu_check/check_entries.hpp"
#include "kernels/gpu_check/timing.cuh"

int main() {
  using namespace kvreplay::kernels::gpu_check;
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    std::printf("no usable CUDA device: %s\n",
                found == cudaSuccess ? "none is installed" : cudaGetErrorString(found));
    return 2;
  }
  try {
    cudaDeviceProp properties{};
    kvreplay::kernels::device::require(cudaGetDeviceProperties(&properties, 0),
                                       "cudaGetDeviceProperties");
    report results;
    check_attend(4097, results);
    check_entries(4097, results);
    check_cache(4097, results);
    std::printf("%s, sm_%d%d: %d checks, %d failed\n", properties.name, properties.major,
                properties.minor, results.checks(), results.failed());
    print_times();
    return results.failed() == 0 ? 0 : 1;
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
}
