#include "tracer/linear.hpp"

#include <doctest/doctest.h>
#include <tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace kvreplay::tracer {
namespace {

std::vector<float> normal_values(std::int64_t count, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(static_cast<size_t>(count));
  for (float& x : out) x = normal(generator);
  return out;
}

bool same_bits(const float* a, const float* b, std::int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

struct layer_case {
  int outputs, inputs;
};

struct prepared_layer {
  std::vector<float> weight, x, y;  // y: all 512 rows in one call
  linear_view view;
};

constexpr std::int64_t all_rows = 512;

prepared_layer prepare(const layer_case& shape) {
  prepared_layer out;
  out.weight = normal_values(std::int64_t{shape.outputs} * shape.inputs, 1);
  out.x = normal_values(all_rows * shape.inputs, 2);
  out.y.resize(static_cast<size_t>(all_rows * shape.outputs));
  out.view = {shape.outputs, shape.inputs, out.weight.data(), nullptr, 0};
  apply_linear(out.view, out.x.data(), all_rows, out.y.data());
  return out;
}

void check_rows(const prepared_layer& layer, std::int64_t first, std::int64_t rows) {
  const std::int64_t outputs = layer.view.outputs;
  std::vector<float> y(static_cast<size_t>(rows * outputs));
  apply_linear(layer.view, layer.x.data() + first * layer.view.inputs, rows, y.data());
  CAPTURE(first);
  CAPTURE(rows);
  CHECK(same_bits(y.data(), layer.y.data() + first * outputs, rows * outputs));
}

TEST_CASE("a row's bits do not depend on the number of rows, their place or the threads") {
  const layer_case shapes[] = {{48, 48},    {61, 48},    {16, 40},  {576, 576},
                               {576, 1536}, {1536, 576}, {960, 576}};
  for (const layer_case& shape : shapes) {
    CAPTURE(shape.outputs);
    CAPTURE(shape.inputs);
    const prepared_layer layer = prepare(shape);
    for (const std::int64_t rows : {1, 2, 7, 16, 17, 64, 128}) {
      for (const std::int64_t first : {0, 1, 13, 100, 384}) check_rows(layer, first, rows);
    }
    for (const size_t threads : {1, 2}) {
      const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, threads);
      check_rows(layer, 0, all_rows);
      check_rows(layer, 200, 33);
    }
  }
}

TEST_CASE("an output head's rows keep their bits too") {
  const prepared_layer layer = prepare({49152, 576});
  check_rows(layer, 500, 1);
  check_rows(layer, 3, 2);
  check_rows(layer, 77, 17);
  check_rows(layer, 128, 64);
  const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 1);
  check_rows(layer, 31, 7);
}

TEST_CASE("products agree with double precision") {
  const layer_case shapes[] = {{1, 1}, {5, 3}, {61, 48}, {300, 96}, {576, 576}};
  for (const layer_case& shape : shapes) {
    const prepared_layer layer = prepare(shape);
    const auto bias = normal_values(shape.outputs, 3);
    linear_view with_bias = layer.view;
    with_bias.bias = bias.data();
    std::vector<float> y(static_cast<size_t>(19 * shape.outputs));
    apply_linear(with_bias, layer.x.data(), 19, y.data());
    double worst = 0;
    for (std::int64_t r = 0; r < 19; ++r) {
      for (std::int64_t o = 0; o < shape.outputs; ++o) {
        double sum = bias[static_cast<size_t>(o)];
        for (std::int64_t i = 0; i < shape.inputs; ++i) {
          sum += static_cast<double>(layer.x[static_cast<size_t>(r * shape.inputs + i)]) *
                 layer.weight[static_cast<size_t>(o * shape.inputs + i)];
        }
        const double difference = std::abs(sum - y[static_cast<size_t>(r * shape.outputs + o)]);
        worst = std::max(worst, difference / (1 + std::abs(sum)));
      }
    }
    CAPTURE(shape.outputs);
    CHECK(worst < 1e-4);
  }
}

TEST_CASE("strided rows and slices of a wider weight") {
  const auto weight = normal_values(40 * 24, 4), x = normal_values(20 * 30, 5);
  std::vector<float> dense_weight, dense_x;
  for (int o = 0; o < 40; ++o) {
    for (int i = 0; i < 8; ++i)
      dense_weight.push_back(weight[static_cast<size_t>(o * 24 + 16 + i)]);
  }
  for (int r = 0; r < 20; ++r) {
    for (int i = 0; i < 8; ++i) dense_x.push_back(x[static_cast<size_t>(r * 30 + 10 + i)]);
  }
  std::vector<float> strided(20 * 40), dense(20 * 40);
  apply_linear({40, 8, weight.data() + 16, nullptr, 24}, x.data() + 10, 20, strided.data(), 30);
  apply_linear({40, 8, dense_weight.data(), nullptr, 0}, dense_x.data(), 20, dense.data());
  for (size_t i = 0; i < dense.size(); ++i) {
    CHECK(strided[i] == doctest::Approx(dense[i]).epsilon(1e-5));
  }
}

TEST_CASE("rms_norm and silu_gate by hand") {
  const std::vector<float> weight = {1, 2}, x = {3, 4, 0, 0};
  std::vector<float> y(4);
  rms_norm(weight, 0, x.data(), 1, y.data());
  CHECK(y[0] == doctest::Approx(3 / std::sqrt(12.5)));
  CHECK(y[1] == doctest::Approx(8 / std::sqrt(12.5)));
  rms_norm(weight, 1e-6, x.data() + 2, 1, y.data());
  CHECK(y[0] == 0);
  const std::vector<float> gate_up = {0, 1, -200, 5, 6, 7};
  std::vector<float> gated(3);
  silu_gate(gate_up.data(), 1, 3, gated.data());
  CHECK(gated[0] == 0);
  CHECK(gated[1] == doctest::Approx(6 / (1 + std::exp(-1.0))));
  CHECK(gated[2] == doctest::Approx(0));
}

}  // namespace
}  // namespace kvreplay::tracer
