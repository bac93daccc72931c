// The host twins of the device intrinsics against plain arithmetic, and what a launch refuses.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/simt/simt.hpp"
#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using testing::numbers;

struct mma_arguments {
  const std::uint32_t *a = nullptr, *b = nullptr;  // [4][32], [2][32] registers of the lanes
  int* d_int = nullptr;                            // [16, 8]
  float* d_float = nullptr;                        // [16, 8]
};

SIMT_KERNEL multiply_once(mma_arguments m) {
  const unsigned lane = simt::thread_index();
  std::uint32_t a[4], b[2];
  for (unsigned i = 0; i < 4; ++i) a[i] = m.a[i * 32 + lane];
  for (unsigned i = 0; i < 2; ++i) b[i] = m.b[i * 32 + lane];
  int d_int[4] = {1, 2, 3, 4};
  float d_float[4] = {1, 2, 3, 4};
  if (m.d_int != nullptr) {
    simt::mma_s8(d_int, a, b);
  } else {
    simt::mma_f16(d_float, a, b);
  }
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned at = (lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2;
    if (m.d_int != nullptr) m.d_int[at] = d_int[i];
    if (m.d_float != nullptr) m.d_float[at] = d_float[i];
  }
}

// The PTX manual's tables: register i of a lane holds row group + 8 * (i & 1), and `per` elements
// from column (lane % 4) * per + 4 * per * (i >> 1).
TEST_CASE("simt: m16n8k32 multiplies int8 fragments laid out as the PTX manual says") {
  numbers random(3);
  std::int8_t a[16][32], b[32][8];
  for (auto& row : a) {
    for (auto& x : row) x = static_cast<std::int8_t>(random.below(256) - 128);
  }
  for (auto& row : b) {
    for (auto& x : row) x = static_cast<std::int8_t>(random.below(256) - 128);
  }
  std::vector<std::uint32_t> ra(128), rb(64);
  for (int lane = 0; lane < 32; ++lane) {
    for (int byte = 0; byte < 4; ++byte) {
      for (int i = 0; i < 4; ++i) {
        const auto x = static_cast<std::uint8_t>(
            a[lane / 4 + 8 * (i & 1)][lane % 4 * 4 + byte + 16 * (i >> 1)]);
        ra[static_cast<std::size_t>(i * 32 + lane)] |= std::uint32_t{x} << (8 * byte);
      }
      for (int i = 0; i < 2; ++i) {
        const auto x = static_cast<std::uint8_t>(b[lane % 4 * 4 + byte + 16 * i][lane / 4]);
        rb[static_cast<std::size_t>(i * 32 + lane)] |= std::uint32_t{x} << (8 * byte);
      }
    }
  }
  std::vector<int> d(128);
  simt::launch(multiply_once, {1}, 32, mma_arguments{ra.data(), rb.data(), d.data(), nullptr}, {});
  int wrong = 0;
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 8; ++c) {
      int want = 1 + 2 * (r / 8) + c % 2;
      for (int k = 0; k < 32; ++k) want += a[r][k] * b[k][c];
      wrong += d[static_cast<std::size_t>(r * 8 + c)] == want ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("simt: m16n8k16 multiplies half fragments laid out as the PTX manual says") {
  numbers random(4);
  float a[16][16], b[16][8];
  for (auto& row : a) {
    for (auto& x : row) x = static_cast<float>(random.below(65) - 32) / 8;
  }
  for (auto& row : b) {
    for (auto& x : row) x = static_cast<float>(random.below(65) - 32) / 8;
  }
  std::vector<std::uint32_t> ra(128), rb(64);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const float* row = a[lane / 4 + 8 * (i & 1)] + lane % 4 * 2 + 8 * (i >> 1);
      ra[static_cast<std::size_t>(i * 32 + lane)] = simt::pack_halves(row[0], row[1]);
    }
    for (int i = 0; i < 2; ++i) {
      const int k = lane % 4 * 2 + 8 * i;
      rb[static_cast<std::size_t>(i * 32 + lane)] =
          simt::pack_halves(b[k][lane / 4], b[k + 1][lane / 4]);
    }
  }
  std::vector<float> d(128);
  simt::launch(multiply_once, {1}, 32, mma_arguments{ra.data(), rb.data(), nullptr, d.data()}, {});
  int wrong = 0;
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 8; ++c) {
      float want = static_cast<float>(1 + 2 * (r / 8) + c % 2);  // multiples of 1/64: exact sums
      for (int k = 0; k < 16; ++k) want += a[r][k] * b[k][c];
      wrong += d[static_cast<std::size_t>(r * 8 + c)] == want ? 0 : 1;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("simt: byte permute, dot product and roundings") {
  CHECK(simt::permute_bytes(0x33221100u, 0x77665544u, 0x7362) == 0x77336622u);
  CHECK(simt::permute_bytes(0x33221100u, 0x77665544u, 0x5140) == 0x55114400u);
  CHECK(simt::dot4(0x80017f02u, 0x7f02ff03u, 5) == -128 * 127 + 1 * 2 - 127 + 2 * 3 + 5);
  CHECK(simt::round_to_int(2.5F) == 2);
  CHECK(simt::round_to_int(3.5F) == 4);
  CHECK(simt::round_to_int(-2.5F) == -2);
  CHECK(simt::round_to_int(NAN) == 0);
  CHECK(simt::round_to_int(1e30F) == INT32_MAX);
}

struct shuffle_arguments {
  int* out = nullptr;  // [threads]
  int* total = nullptr;
};

SIMT_KERNEL shuffle_and_vote(shuffle_arguments a) {
  const int t = static_cast<int>(simt::thread_index());
  const int other = simt::shuffle_xor(t, 5);
  const int third = simt::shuffle(t, 3);
  const unsigned odd = simt::ballot(t % 2 == 1);
  simt::atomic_add(a.total, 1);
  simt::atomic_max(a.total + 1, t);
  a.out[t] = other * 100 + third + (odd == 0xaaaaaaaau ? 10000000 : 0);
}

TEST_CASE("simt: shuffles, votes and atomics give the same under every schedule") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    const simt::scheduled with({seed});
    std::vector<int> out(96), total(2);
    simt::launch(shuffle_and_vote, {1}, 96, shuffle_arguments{out.data(), total.data()}, {});
    int wrong = 0;
    for (int t = 0; t < 96; ++t) {
      const int want = 10000000 + (t ^ 5) * 100 + t / 32 * 32 + 3;
      wrong += out[static_cast<std::size_t>(t)] == want ? 0 : 1;
    }
    CHECK(wrong == 0);
    CHECK(total[0] == 96);
    CHECK(total[1] == 95);
  }
}

SIMT_KERNEL note_order(shuffle_arguments a) {
  a.out[simt::atomic_add(a.total, 1)] =
      static_cast<int>(simt::block_x() * 32 + simt::thread_index());
}

TEST_CASE("simt: seeds change the order of threads and blocks, and repeat") {
  const auto order = [](std::uint64_t seed) {
    const simt::scheduled with({seed});
    std::vector<int> out(128), total(2);
    simt::launch(note_order, {4}, 32, shuffle_arguments{out.data(), total.data()}, {});
    return out;
  };
  CHECK(order(7) == order(7));
  CHECK(order(7) != order(8));
  CHECK(order(0) != order(7));
  CHECK(order(0)[127] == 127);
}

TEST_CASE("simt: launches that a device would refuse fail") {
  int total[2] = {}, out[1] = {};
  const shuffle_arguments a{out, total};
  CHECK_THROWS_AS(simt::launch(note_order, {1}, 33, a, {}), simt::failure);
  CHECK_THROWS_AS(simt::launch(note_order, {1}, 2048, a, {}), simt::failure);
  CHECK_THROWS_AS(simt::launch(note_order, {1, 70000}, 32, a, {}), simt::failure);
  CHECK_THROWS_AS(simt::launch(note_order, {0}, 32, a, {}), simt::failure);
}

}  // namespace
}  // namespace kvreplay::kernels
