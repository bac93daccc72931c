// The device cache on the host emulator, for tests.
#include "kernels/device_cache_steps.cuh"

namespace kvreplay::kernels {

std::unique_ptr<compute_device> open_emulated_device() {
  return std::make_unique<device::device_of_kernels>("emulator");
}

}  // namespace kvreplay::kernels
