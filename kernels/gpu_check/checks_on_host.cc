// The checks of kernels_gpu_check.cu on the host emulator, over shorter rows: what the check
// program compares is known to agree before a device sees it.
#include <cstdio>
#include <exception>

#include "kernels/gpu_check/check_attend.hpp"
#include "kernels/gpu_check/check_cache.hpp"
#include "kernels/gpu_check/check_entries.hpp"

int main() {
  using namespace kvreplay::kernels::gpu_check;
  try {
    report results;
    check_attend(33, results);
    check_entries(33, results);
    check_cache(45, results);
    std::printf("emulator: %d checks, %d failed\n", results.checks(), results.failed());
    return results.checks() > 0 && results.failed() == 0 ? 0 : 1;
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
}
