#include "tracer/full_attention.hpp"

#include <doctest/doctest.h>
#include <tbb/global_control.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace kvreplay::tracer {
namespace {

struct attention_data {
  full_attention_shape shape;
  std::int64_t total;
  std::vector<float> q, k, v, o, lse;

  attention_data(const full_attention_shape& s, std::int64_t positions)
      : shape(s), total(positions) {
    std::mt19937 generator(7);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, std::int64_t width) {
      values.resize(static_cast<size_t>(positions * width));
      for (float& x : values) x = normal(generator);
    };
    fill(q, s.q_heads * s.head_dim);
    fill(k, s.kv_heads * s.head_dim);
    fill(v, s.kv_heads * s.value_dim);
    o.resize(static_cast<size_t>(positions * s.q_heads * s.value_dim));
    lse.resize(static_cast<size_t>(positions * s.q_heads));
  }

  void run(std::int64_t first, std::int64_t rows) {
    full_attention(shape, first, rows, q.data() + first * shape.q_heads * shape.head_dim, k.data(),
                   v.data(), o.data() + first * shape.q_heads * shape.value_dim,
                   lse.data() + first * shape.q_heads);
  }

  void run_in_blocks(std::int64_t block) {
    for (std::int64_t first = 0; first < total; first += block) {
      run(first, std::min(block, total - first));
    }
  }

  // Probabilities of a row in double, [position + 1]; and its log-sum-exp.
  std::vector<double> reference(std::int64_t position, int head, double& log_sum) const {
    const int kv_head = head / (shape.q_heads / shape.kv_heads);
    std::vector<double> p(static_cast<size_t>(position + 1), -INFINITY);
    const std::int64_t low =
        shape.window == 0 ? 0 : std::max<std::int64_t>(0, position - shape.window + 1);
    for (std::int64_t j = low; j <= position; ++j) {
      double dot = 0;
      for (int c = 0; c < shape.head_dim; ++c) {
        dot += static_cast<double>(
                   q[static_cast<size_t>((position * shape.q_heads + head) * shape.head_dim + c)]) *
               k[static_cast<size_t>((j * shape.kv_heads + kv_head) * shape.head_dim + c)];
      }
      p[static_cast<size_t>(j)] = dot * shape.softmax_scale;
    }
    const double top = *std::max_element(p.begin(), p.end());
    double sum = 0;
    for (const double x : p) sum += std::exp(x - top);
    log_sum = top + std::log(sum);
    for (double& x : p) x = std::exp(x - log_sum);
    return p;
  }
};

void check_against_double(const attention_data& data) {
  const full_attention_shape& s = data.shape;
  double worst = 0;
  for (std::int64_t t = 0; t < data.total; ++t) {
    for (int h = 0; h < s.q_heads; ++h) {
      double log_sum = 0;
      const auto p = data.reference(t, h, log_sum);
      worst = std::max(worst, std::abs(log_sum - data.lse[static_cast<size_t>(t * s.q_heads + h)]));
      for (int c = 0; c < s.value_dim; ++c) {
        double expected = 0;
        for (size_t j = 0; j < p.size(); ++j) {
          expected += p[j] * data.v[(j * static_cast<size_t>(s.kv_heads) +
                                     static_cast<size_t>(h / (s.q_heads / s.kv_heads))) *
                                        static_cast<size_t>(s.value_dim) +
                                    static_cast<size_t>(c)];
        }
        const float got = data.o[static_cast<size_t>((t * s.q_heads + h) * s.value_dim + c)];
        worst = std::max(worst, std::abs(expected - got));
      }
    }
  }
  CHECK(worst < 1e-5);
}

bool same(const std::vector<float>& a, const std::vector<float>& b) {
  return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

const full_attention_shape shapes[] = {{6, 2, 8, 8, 0.35, 0},    {7, 1, 8, 8, 0.35, 0},
                                       {9, 3, 64, 64, 0.125, 0}, {4, 4, 16, 24, 0.25, 0},
                                       {6, 2, 8, 8, 0.35, 5},    {6, 3, 16, 16, 0.25, 130}};

TEST_CASE("full attention agrees with double precision, windows included") {
  for (const auto& shape : shapes) {
    attention_data data(shape, 150);
    data.run(0, data.total);
    CAPTURE(shape.q_heads);
    CAPTURE(shape.window);
    check_against_double(data);
  }
}

TEST_CASE("bits do not depend on how the rows are cut into calls, nor on threads") {
  for (const auto& shape : shapes) {
    CAPTURE(shape.q_heads);
    CAPTURE(shape.window);
    attention_data whole(shape, 300);
    whole.run(0, whole.total);
    for (const std::int64_t block : {1, 7, 16, 128, 129}) {
      CAPTURE(block);
      attention_data cut(shape, 300);
      cut.run_in_blocks(block);
      CHECK(same(cut.o, whole.o));
      CHECK(same(cut.lse, whole.lse));
    }
    const tbb::global_control limit(tbb::global_control::max_allowed_parallelism, 1);
    attention_data alone(shape, 300);
    alone.run(0, alone.total);
    CHECK(same(alone.o, whole.o));
  }
}

TEST_CASE("one key has weight one, and scores far beyond 16 bits keep their softmax") {
  const full_attention_shape shape{1, 1, 128, 1, 1 / std::sqrt(128.0), 0};
  const std::vector<float> q(2 * 128, 256.0f), k(2 * 128, 256.0f), v = {3, 5};
  std::vector<float> o(2), lse(2);
  full_attention(shape, 0, 2, q.data(), k.data(), v.data(), o.data(), lse.data());
  CHECK(o[0] == 3);
  CHECK(o[1] == 4);
  const double score = 128.0 * 65536 / std::sqrt(128.0);
  CHECK(lse[0] == doctest::Approx(score));
}

TEST_CASE("probability rows and column sums") {
  for (const auto& shape : shapes) {
    CAPTURE(shape.window);
    attention_data data(shape, 140);
    data.run(0, data.total);
    std::vector<double> expected(static_cast<size_t>(shape.q_heads * data.total), 0.0);
    double worst = 0;
    std::vector<float> row(static_cast<size_t>(shape.q_heads * 150));
    for (std::int64_t t = 0; t < data.total; ++t) {
      attention_probabilities(shape, t, data.q.data() + t * shape.q_heads * shape.head_dim,
                              data.k.data(), data.lse.data() + t * shape.q_heads, 150, row.data());
      for (int h = 0; h < shape.q_heads; ++h) {
        double log_sum = 0;
        auto p = data.reference(t, h, log_sum);
        p.resize(150, 0.0);
        for (size_t j = 0; j < p.size(); ++j) {
          worst = std::max(worst, std::abs(p[j] - row[static_cast<size_t>(h) * 150 + j]));
          if (j < static_cast<size_t>(data.total)) {
            expected[static_cast<size_t>(h * data.total) + j] += p[j];
          }
        }
      }
    }
    CHECK(worst < 1e-5);
    for (const std::int64_t block : {1, 33, 140}) {
      std::vector<double> sums(expected.size(), 0.0);
      for (std::int64_t first = 0; first < data.total; first += block) {
        add_column_sums(shape, first, std::min(block, data.total - first),
                        data.q.data() + first * shape.q_heads * shape.head_dim, data.k.data(),
                        data.lse.data() + first * shape.q_heads, data.total, sums.data());
      }
      double difference = 0;
      for (size_t i = 0; i < sums.size(); ++i) {
        difference = std::max(difference, std::abs(sums[i] - expected[i]));
      }
      CHECK(difference < 1e-4);
    }
  }
}

}  // namespace
}  // namespace kvreplay::tracer
