// What the program links where the build found no nvcc.
#include "kernels/device_cache.hpp"

namespace kvreplay::kernels {

std::unique_ptr<compute_device> open_cuda_device(std::string& why) {
  why = "this build has no CUDA";
  return nullptr;
}

std::string cuda_version() { return "none"; }

}  // namespace kvreplay::kernels
