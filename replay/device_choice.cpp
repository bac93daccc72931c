#include "replay/device_choice.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "replay/commands.hpp"

namespace kvreplay::replay {

std::unique_ptr<kernels::compute_device> choose_device(const std::string& choice) {
  if (choice == "cpu") return nullptr;
  std::string why;
  auto device = kernels::open_cuda_device(why);
  if (device == nullptr && choice == "cuda") {
    throw std::runtime_error(fmt::format("--device cuda: {}; use --device cpu or auto", why));
  }
  return device;
}

std::string device_name(const kernels::compute_device* device) {
  return device == nullptr ? "cpu" : device->name();
}

std::string gpu_text() {
  std::string why;
  const auto device = kernels::open_cuda_device(why);
  return device != nullptr ? device->name() : fmt::format("none ({})", why);
}

void require_cpu(const std::string& choice, const std::string& command) {
  if (choice == "cuda") {
    throw usage_error(
        fmt::format("--device cuda: {} runs on the CPU only; use --device cpu or auto", command));
  }
}

}  // namespace kvreplay::replay
