// Small texts that several commands print.
#pragma once

#include <string>

namespace kvreplay::replay {

// 1536 -> "1.5 KiB". For eyes only; files never scale.
std::string bytes_text(double bytes);

// "kvreplay 0.1.0": the producer of a trace.
std::string producer_text();

std::string version_number();
std::string revision_text();
std::string compiler_text();
std::string cpu_text();  // the processor's name as the system gives it
std::string hdf5_text();
std::string cuda_text();  // "none" where the build has no CUDA

}  // namespace kvreplay::replay
