#include "kernels/isa.hpp"

#include <fmt/format.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels/inner_loops.hpp"

namespace kvreplay::kernels {
namespace {

constexpr isa all_sets[] = {isa::plain, isa::avx2, isa::avx512};
constexpr int not_forced = -1;

// What tests force, shared by all threads on purpose; nothing else writes it.
std::atomic<int> forced = not_forced;

std::string supported_names() {
  std::string names;
  for (const isa set : all_sets) {
    if (!isa_supported(set)) continue;
    if (!names.empty()) names += ", ";
    names += isa_name(set);
  }
  return names;
}

isa best_supported() {
  isa best = isa::plain;
  for (const isa set : all_sets) {
    if (isa_supported(set)) best = set;
  }
  return best;
}

isa chosen_isa() {
  const char* wanted = std::getenv("KVREPLAY_ISA");
  return wanted == nullptr ? best_supported() : parse_isa(wanted);
}

}  // namespace

std::string_view isa_name(isa set) {
  switch (set) {
    case isa::avx2:
      return "avx2";
    case isa::avx512:
      return "avx512";
    case isa::plain:
      break;
  }
  return "plain";
}

bool isa_supported(isa set) {
  if (set == isa::plain) return true;
#if defined(__x86_64__)
  if (set == isa::avx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
  }
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
#else
  return false;
#endif
}

isa parse_isa(std::string_view name) {
  for (const isa set : all_sets) {
    if (name != isa_name(set)) continue;
    if (isa_supported(set)) return set;
    throw std::invalid_argument(
        fmt::format("KVREPLAY_ISA: this machine has no {}; it has {}", name, supported_names()));
  }
  throw std::invalid_argument(
      fmt::format("KVREPLAY_ISA is '{}', expected plain, avx2 or avx512", name));
}

isa active_isa() {
  const int set = forced.load(std::memory_order_relaxed);
  if (set != not_forced) return static_cast<isa>(set);
  static const isa chosen = chosen_isa();
  return chosen;
}

forced_isa::forced_isa(isa set) : before_(forced.load()) {
  forced.store(static_cast<int>(parse_isa(isa_name(set))));
}

forced_isa::~forced_isa() { forced.store(before_); }

const inner_loops& active_loops() {
  switch (active_isa()) {
#if defined(__x86_64__)
    case isa::avx2:
      return avx2_loops;
    case isa::avx512:
      return avx512_loops;
#else
    case isa::avx2:
    case isa::avx512:
#endif
    case isa::plain:
      break;
  }
  return plain_loops;
}

}  // namespace kvreplay::kernels
