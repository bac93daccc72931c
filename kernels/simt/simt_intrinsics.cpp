// Host twins of the device's byte permute, dot products and matrix fragments. Layouts: PTX ISA,
// sections prmt, dp4a, mma.m16n8k32 (s8) and mma.m16n8k16 (f16).
#include "kernels/simt/simt.hpp"

namespace kvreplay::kernels::simt {
namespace {

struct fragments {
  std::uint64_t a01[warp_size], a23[warp_size], b[warp_size];
};

// Every lane's operands. `operation` keeps the three rendezvous of one mma apart from others.
void gather(int operation, const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
            const location& at, fragments& f) {
  exchange(operation, a[0] | std::uint64_t{a[1]} << 32, false, at, f.a01);
  exchange(operation + 1, a[2] | std::uint64_t{a[3]} << 32, false, at, f.a23);
  exchange(operation + 2, b[0] | std::uint64_t{b[1]} << 32, false, at, f.b);
}

// Register `index` (0..3) of A in a lane: 0 and 2 hold row r, 1 and 3 row r + 8.
std::uint32_t register_a(const fragments& f, int lane, int index) {
  const std::uint64_t pair = index < 2 ? f.a01[lane] : f.a23[lane];
  return static_cast<std::uint32_t>(pair >> (32 * (index & 1)));
}

}  // namespace

std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  const std::uint64_t bytes = a | std::uint64_t{b} << 32;
  std::uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t which = selector >> (4 * i) & 7u;
    out |= static_cast<std::uint32_t>(bytes >> (8 * which) & 255u) << (8 * i);
  }
  return out;
}

int dot4(std::uint32_t a, std::uint32_t b, int c) {
  for (int i = 0; i < 4; ++i) {
    c += static_cast<std::int8_t>(a >> (8 * i)) * static_cast<std::int8_t>(b >> (8 * i));
  }
  return c;
}

void mma_s8(int (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
            const location& at) {
  fragments f;
  gather(16, a, b, at, f);
  const int lane = static_cast<int>(thread_index() % warp_size);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 32; ++k) {
      const int holder = k % 16 / 4, byte = 8 * (k % 4);
      const std::uint32_t wa = register_a(f, row % 8 * 4 + holder, row / 8 + 2 * (k / 16));
      const auto wb = static_cast<std::uint32_t>(f.b[column * 4 + holder] >> (32 * (k / 16)));
      d[i] += static_cast<std::int8_t>(wa >> byte) * static_cast<std::int8_t>(wb >> byte);
    }
  }
}

void mma_f16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
             const location& at) {
  fragments f;
  gather(19, a, b, at, f);
  const int lane = static_cast<int>(thread_index() % warp_size);
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const int holder = k % 8 / 2, part = 16 * (k % 2);
      const std::uint32_t wa = register_a(f, row % 8 * 4 + holder, row / 8 + 2 * (k / 8));
      const auto wb = static_cast<std::uint32_t>(f.b[column * 4 + holder] >> (32 * (k / 8)));
      d[i] += half_to_float(static_cast<std::uint16_t>(wa >> part)) *
              half_to_float(static_cast<std::uint16_t>(wb >> part));
    }
  }
}

}  // namespace kvreplay::kernels::simt
