// The device cache on CUDA, for the program.
#include "kernels/device_cache_steps.cuh"

namespace kvreplay::kernels {

std::unique_ptr<compute_device> open_cuda_device(std::string& why) {
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    why = found == cudaSuccess ? "no device is installed" : cudaGetErrorString(found);
    return nullptr;
  }
  cudaDeviceProp properties{};
  const cudaError_t known = cudaGetDeviceProperties(&properties, 0);
  if (known != cudaSuccess) {
    why = cudaGetErrorString(known);
    return nullptr;
  }
  std::string name = properties.name;
  name.append(", sm_").append(std::to_string(properties.major * 10 + properties.minor));
  // An image of the kernels for this architecture, or one that the driver can make.
  cudaFuncAttributes attributes{};
  const cudaError_t image = cudaFuncGetAttributes(&attributes, device::append_kernel);
  if (image != cudaSuccess) {
    why = name.append(": ").append(cudaGetErrorString(image));
    return nullptr;
  }
  return std::make_unique<device::device_of_kernels>(name);
}

std::string cuda_version() {
  return std::to_string(CUDART_VERSION / 1000)
      .append(".")
      .append(std::to_string(CUDART_VERSION % 1000 / 10));
}

}  // namespace kvreplay::kernels
