// Logit summaries and value norms of the device on the host emulator, against double precision.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/confidence_device.cuh"
#include "kernels/simt/device_copy.hpp"
#include "kernels/test_support.hpp"
#include "kernels/value_norm_device.cuh"

namespace kvreplay::kernels {
namespace {

using device::confidence_batch;
using device::logit_row;
using device::logit_state;
using testing::at;
using testing::numbers;

constexpr float infinity = INFINITY;

std::vector<logit_row> summarise(const std::vector<float>& logits, int rows, int vocab,
                                 int blocks) {
  std::vector<logit_state> partial(at(rows * blocks));
  std::vector<logit_row> out(at(rows));
  confidence_batch batch;
  batch.logits = logits.data();
  batch.stride = static_cast<std::int64_t>(logits.size()) / rows;
  batch.rows = rows;
  batch.vocab_size = vocab;
  batch.blocks = blocks;
  batch.partial = partial.data();
  batch.out = out.data();
  launch_confidence(batch, {});
  return out;
}

// Largest error against sums in double, in units of 1 + |expected|; infinite for NaN or a wrong id.
double error_of(const logit_row& got, const float* x, int vocab) {
  double z = 0, t = 0;
  const int best = static_cast<int>(std::max_element(x, x + vocab) - x);
  double second = -infinity;
  for (int i = 0; i < vocab; ++i) {
    const double d = static_cast<double>(x[i]) - static_cast<double>(x[best]);
    if (i != best) second = std::max(second, static_cast<double>(x[i]));
    if (std::isinf(d)) continue;
    z += std::exp(d);
    t += d * std::exp(d);
  }
  double worst = got.argmax == best && got.bad == 0 ? 0 : INFINITY;
  const auto see = [&worst](double a, double b) {
    const double error = a == b ? 0 : std::fabs(a - b) / (1 + std::fabs(b));
    if (!(error <= worst)) worst = error >= 0 ? error : INFINITY;
  };
  see(got.entropy, std::log(z) - t / z);
  see(got.margin, static_cast<double>(x[best]) - second);
  see(got.top, 1 / z);
  see(got.lse, static_cast<double>(x[best]) + std::log(z));
  return worst;
}

TEST_CASE("device confidence: any vocabulary and split, offsets, masks and ties") {
  for (const int vocab : {1, 2, 31, 1024, 1025, 5003}) {
    for (const int blocks : {1, 8, 32}) {
      numbers random(static_cast<std::uint64_t>(vocab));
      std::vector<float> x = random.normals(3 * (vocab + 2));
      const std::int64_t stride = vocab + 2;
      for (std::int64_t i = 0; i < vocab; ++i) {
        x[at(stride + i)] = x[at(stride + i)] * 3 + 500;
        if (i % 3 == 1) x[at(2 * stride + i)] = -infinity;
        if (i % 5 == 2) x[at(2 * stride + i)] = 4;
      }
      for (int r = 0; r < 3; ++r) x[at(r * stride + vocab)] = x[at(r * stride + vocab + 1)] = NAN;
      const simt::scheduled with({static_cast<std::uint64_t>(blocks)});
      const auto rows = summarise(x, 3, vocab, blocks);
      CAPTURE(vocab);
      CAPTURE(blocks);
      for (int r = 0; r < 3; ++r) {
        CHECK(error_of(rows[at(r)], x.data() + r * stride, vocab) < 2e-6);
      }
    }
  }
}

TEST_CASE("device confidence: one sure token, bad logits, and no possible token") {
  std::vector<float> x(3000, -infinity);
  x[1234] = 7;
  const logit_row sure = summarise(x, 1, 3000, 8)[0];
  CHECK(sure.argmax == 1234);
  CHECK(sure.entropy == 0);
  CHECK(sure.margin == infinity);
  CHECK(sure.top == 1);
  CHECK(sure.lse == 7);
  x[17] = NAN;
  x[2900] = infinity;
  CHECK(summarise(x, 1, 3000, 8)[0].bad == 2);
  const logit_row none = summarise(std::vector<float>(100, -infinity), 1, 100, 8)[0];
  CHECK(none.argmax == -1);
  CHECK(none.lse == -infinity);
}

TEST_CASE("device confidence: results do not depend on the schedule" *
          doctest::test_suite("races")) {
  numbers random(1);
  const auto x = random.normals(2 * 2500);
  const auto first = summarise(x, 2, 2500, 4);
  for (std::uint64_t seed = 1; seed < 4; ++seed) {
    const simt::scheduled with({seed});
    const auto again = summarise(x, 2, 2500, 4);
    CHECK(again[1].entropy == first[1].entropy);
    CHECK(again[0].lse == first[0].lse);
  }
}

TEST_CASE("device value norms: heads, groups and positions of any number" *
          doctest::test_suite("races")) {
  struct norm_case {
    int positions, q_heads, kv_heads, value_dim, hidden;
  };
  for (const norm_case c : {norm_case{1, 1, 1, 1, 1}, norm_case{9, 4, 2, 16, 130},
                            norm_case{33, 3, 3, 64, 200}, norm_case{8, 2, 1, 256, 33}}) {
    numbers random(static_cast<std::uint64_t>(c.hidden));
    const auto v = random.normals(c.positions * c.kv_heads * c.value_dim);
    const auto wo = random.normals(std::int64_t{c.q_heads} * c.value_dim * c.hidden);
    std::vector<float> out(at(c.positions * c.q_heads), NAN);
    const simt::scheduled with({static_cast<std::uint64_t>(c.positions)});
    device::launch_value_norm(
        device::value_norm_batch{v.data(), wo.data(), out.data(), c.positions, c.q_heads,
                                 c.kv_heads, c.value_dim, c.hidden},
        {});
    double worst = 0;
    for (int p = 0; p < c.positions; ++p) {
      for (int h = 0; h < c.q_heads; ++h) {
        const int kv = h / (c.q_heads / c.kv_heads);
        double norm = 0;
        for (int j = 0; j < c.hidden; ++j) {
          double dot = 0;
          for (int i = 0; i < c.value_dim; ++i) {
            dot += static_cast<double>(v[at((p * c.kv_heads + kv) * c.value_dim + i)]) *
                   static_cast<double>(wo[at((h * c.value_dim + i) * c.hidden + j)]);
          }
          norm += std::fabs(dot);
        }
        const double error = std::fabs(out[at(p * c.q_heads + h)] - norm) / (1 + norm);
        if (!(error <= worst)) worst = error >= 0 ? error : INFINITY;
      }
    }
    CAPTURE(c.positions);
    CHECK(worst < 2e-6);
  }
}

TEST_CASE("device confidence and value norms: batches that cannot be are refused") {
  CHECK_THROWS_AS(launch_confidence(confidence_batch{}, {}), simt::failure);
  CHECK_THROWS_AS(summarise(std::vector<float>(8, 0.0F), 1, 9, 8), simt::failure);
  CHECK_THROWS_AS(summarise(std::vector<float>(8, 0.0F), 1, 8, 33), simt::failure);
  float x = 0;
  CHECK_THROWS_AS(
      device::launch_value_norm(device::value_norm_batch{&x, &x, &x, 1, 3, 2, 1, 1}, {}),
      simt::failure);
  CHECK_THROWS_AS(
      device::launch_value_norm(device::value_norm_batch{&x, &x, &x, 1, 1, 1, 300, 1}, {}),
      simt::failure);
}

}  // namespace
}  // namespace kvreplay::kernels
