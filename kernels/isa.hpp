// Which instruction set the host kernels use. Chosen once, by what the machine can do; the
// environment variable KVREPLAY_ISA (plain, avx2 or avx512) overrides it.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvreplay::kernels {

// plain: what every machine of the architecture has. avx2: with FMA and F16C. avx512: F, BW, VL, DQ
// and VNNI; INT8 scores are then exact integers over a query of 15 bits (query_digits.hpp).
enum class isa : std::uint8_t { plain, avx2, avx512 };

std::string_view isa_name(isa set);

// Whether this build has the loops and this machine the instructions.
bool isa_supported(isa set);

// What KVREPLAY_ISA's value asks for. Throws std::invalid_argument for unknown names and for sets
// that are not supported here.
isa parse_isa(std::string_view name);

// The best one supported, unless KVREPLAY_ISA or a forced_isa says otherwise. Throws as parse_isa.
isa active_isa();

// Tests and benchmarks: `set` is used by all threads while the object lives. Objects must end in
// reverse order. Throws std::invalid_argument where `set` is not supported.
class forced_isa {
 public:
  explicit forced_isa(isa set);
  ~forced_isa();
  forced_isa(const forced_isa&) = delete;
  forced_isa& operator=(const forced_isa&) = delete;

 private:
  int before_;
};

}  // namespace kvreplay::kernels
