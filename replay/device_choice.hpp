// --device: what a command runs on.
#pragma once

#include <memory>
#include <string>

#include "kernels/device_cache.hpp"

namespace kvreplay::replay {

// cpu: null. auto: the CUDA device, or null where there is none to use. cuda: throws
// std::runtime_error where there is none, with the reason.
std::unique_ptr<kernels::compute_device> choose_device(const std::string& choice);

// "cpu", or the device's name.
std::string device_name(const kernels::compute_device* device);

// The GPU of this machine, or "none" and why.
std::string gpu_text();

// Refuses --device cuda for commands that have no device code.
void require_cpu(const std::string& choice, const std::string& command);

}  // namespace kvreplay::replay
