#include "replay/text.hpp"

#include <H5public.h>
#include <fmt/format.h>

#include <array>
#include <fstream>

#include "kernels/device_cache.hpp"
#include "replay/commands.hpp"
#include "replay/device_choice.hpp"

namespace kvreplay::replay {

std::string bytes_text(double bytes) {
  constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < units.size()) {
    bytes /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, units[unit]);
}

std::string version_number() { return KVREPLAY_VERSION; }
std::string revision_text() { return KVREPLAY_REVISION; }
std::string compiler_text() { return fmt::format("g++ {}", __VERSION__); }
std::string producer_text() { return fmt::format("kvreplay {}", version_number()); }

std::string cpu_text() {
  std::ifstream info("/proc/cpuinfo");
  std::string line;
  while (std::getline(info, line)) {
    if (line.rfind("model name", 0) != 0) continue;
    const auto colon = line.find(':');
    if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string hdf5_text() {
  return fmt::format("{}.{}.{}", H5_VERS_MAJOR, H5_VERS_MINOR, H5_VERS_RELEASE);
}

std::string cuda_text() { return kernels::cuda_version(); }

std::string version_text() {
  return fmt::format(
      "kvreplay {}\nrevision {}\ncompiler {}\nHDF5     {}\nCUDA     {}\nCPU      {}\nGPU      {}",
      version_number(), revision_text(), compiler_text(), hdf5_text(), cuda_text(), cpu_text(),
      gpu_text());
}

}  // namespace kvreplay::replay
