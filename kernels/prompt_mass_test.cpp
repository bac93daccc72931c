#include "kernels/prompt_mass.hpp"

#include <doctest/doctest.h>

#include <stdexcept>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

struct prompt {
  cache_shape shape;
  std::int64_t n = 0;
  std::vector<float> q, k;
  prompt_rows rows() const { return {q.data(), k.data(), nullptr, 0, n}; }
};

prompt make_prompt(int q_heads, int kv_heads, int dim, std::int64_t n, int window, bool sinks) {
  numbers random(static_cast<std::uint64_t>(n + q_heads));
  prompt p;
  p.shape = small_shape(q_heads, kv_heads, dim);
  p.n = n;
  if (window > 0) p.shape.window = {window};
  if (sinks) p.shape.sink_logits = random.normals(q_heads);
  p.q = random.normals(n * q_heads * dim);
  p.k = random.normals(n * kv_heads * dim);
  return p;
}

// Probabilities of one row in double, [n]; *lse is its log-sum-exp.
std::vector<double> plain_row(const prompt& p, std::int64_t position, int head, double* lse) {
  const cache_shape& s = p.shape;
  std::vector<double> row(static_cast<std::size_t>(p.n), 0.0);
  const int window = s.window_of(0);
  double sum = s.sink_logits.empty() ? 0 : std::exp(s.sink_logits[static_cast<size_t>(head)]);
  for (std::int64_t i = 0; i <= position; ++i) {
    if (window > 0 && i <= position - window) continue;
    double x = 0;
    for (int c = 0; c < s.head_dim; ++c) {
      const auto a = static_cast<std::size_t>((position * s.q_heads + head) * s.head_dim + c);
      const auto b = static_cast<std::size_t>((i * s.kv_heads + head / s.group()) * s.head_dim + c);
      x += static_cast<double>(p.q[a]) * static_cast<double>(p.k[b]);
    }
    row[static_cast<std::size_t>(i)] = std::exp(x * s.softmax_scale);
    sum += row[static_cast<std::size_t>(i)];
  }
  for (double& x : row) x /= sum;
  if (lse != nullptr) *lse = std::log(sum);
  return row;
}

// Mass of one row reduced over the group of KV head h, [n].
std::vector<double> plain_reduced(const prompt& p, std::int64_t position, int h,
                                  mass_layout reduce) {
  const bool layer = reduce == mass_layout::layer_mean;
  const int first = layer ? 0 : h * p.shape.group();
  const int count = layer ? p.shape.q_heads : p.shape.group();
  std::vector<double> out(static_cast<std::size_t>(p.n), 0.0);
  for (int g = first; g < first + count; ++g) {
    const std::vector<double> row = plain_row(p, position, g, nullptr);
    for (std::size_t i = 0; i < row.size(); ++i) {
      out[i] = reduce == mass_layout::max ? std::max(out[i], row[i]) : out[i] + row[i];
    }
  }
  const bool mean = layer || reduce == mass_layout::mean;
  for (double& x : out) x /= mean ? count : 1;
  return out;
}

const mass_layout reductions[] = {mass_layout::mean, mass_layout::max, mass_layout::sum,
                                  mass_layout::layer_mean};

std::vector<prompt> prompts() {
  std::vector<prompt> all;
  all.push_back(make_prompt(4, 2, 16, 37, 0, false));
  all.push_back(make_prompt(7, 1, 10, 50, 9, false));
  all.push_back(make_prompt(2, 2, 8, 33, 0, true));
  all.push_back(make_prompt(6, 2, 5, 41, 20, true));
  all.push_back(make_prompt(1, 1, 1, 1, 0, false));
  return all;
}

TEST_CASE("column sums agree with a plain computation in double") {
  for (const prompt& p : prompts()) {
    for (const mass_layout reduce : reductions) {
      std::vector<float> got;
      column_sums(p.shape, 0, p.rows(), reduce, got);
      REQUIRE(got.size() == static_cast<std::size_t>(p.shape.kv_heads * p.n));
      for (int h = 0; h < p.shape.kv_heads; ++h) {
        std::vector<double> want(static_cast<std::size_t>(p.n), 0.0);
        for (std::int64_t t = 0; t < p.n; ++t) {
          const std::vector<double> row = plain_reduced(p, t, h, reduce);
          for (std::size_t i = 0; i < row.size(); ++i) want[i] += row[i];
        }
        for (std::size_t i = 0; i < want.size(); ++i) {
          CHECK(near(got[static_cast<std::size_t>(h * p.n) + i], want[i], 1e-5));
        }
      }
    }
  }
}

TEST_CASE("rows, their log-sum-exp and the mean over rows agree with a plain computation") {
  for (const prompt& p : prompts()) {
    const std::int64_t n = std::min<std::int64_t>(12, p.n);
    std::vector<float> rows;
    last_rows(p.shape, 0, p.rows(), 12, rows);
    REQUIRE(rows.size() == static_cast<std::size_t>(n * p.shape.q_heads * p.n));
    std::size_t at = 0;
    for (std::int64_t t = p.n - n; t < p.n; ++t) {
      for (int g = 0; g < p.shape.q_heads; ++g) {
        for (const double want : plain_row(p, t, g, nullptr)) {
          CHECK(near(rows[at], want, 1e-5));
          if (want == 0) CHECK(rows[at] == 0.0F);
          ++at;
        }
      }
    }
    for (const mass_layout reduce : reductions) {
      std::vector<float> got;
      mean_of_rows(p.shape, 0, rows, n, p.n, reduce, got);
      for (int h = 0; h < p.shape.kv_heads; ++h) {
        for (std::int64_t i = 0; i < p.n; ++i) {
          double sum = 0;
          int seen = 0;
          for (std::int64_t t = p.n - n; t < p.n; ++t) {
            const int window = p.shape.window_of(0);
            if (i > t || (window > 0 && i <= t - window)) continue;
            sum += plain_reduced(p, t, h, reduce)[static_cast<std::size_t>(i)];
            ++seen;
          }
          const double want = seen == 0 ? 0 : sum / seen;
          CHECK(near(got[static_cast<std::size_t>(h * p.n + i)], want, 1e-5));
        }
      }
    }
  }
}

TEST_CASE("full rows: a given log-sum-exp is used, a missing one is computed and handed back") {
  const prompt p = make_prompt(6, 2, 24, 45, 17, true);
  constexpr std::int64_t first = 20, stride = 50;
  const std::int64_t steps = p.n - first, count = steps * 6;
  const float* q = p.q.data() + first * 6 * 24;
  std::vector<float> rows(static_cast<std::size_t>(count * stride), NAN);
  std::vector<float> lse(static_cast<std::size_t>(count), NAN);
  full_rows(p.shape, 0, q, p.k.data(), nullptr, first, steps, stride, rows.data(), lse.data());
  for (std::int64_t r = 0; r < count; ++r) {
    double want_lse = 0;
    const auto want = plain_row(p, first + r / 6, static_cast<int>(r % 6), &want_lse);
    CHECK(near(lse[static_cast<std::size_t>(r)], want_lse, 1e-6));
    for (std::int64_t i = 0; i < stride; ++i) {
      const float got = rows[static_cast<std::size_t>(r * stride + i)];
      const double w = i < p.n ? want[static_cast<std::size_t>(i)] : 0.0;
      CHECK(near(got, w, 1e-5));
      if (w == 0) CHECK(got == 0.0F);
    }
  }
  std::vector<float> given(rows.size(), NAN);
  for (float& x : lse) x += static_cast<float>(std::log(2.0));
  full_rows(p.shape, 0, q, p.k.data(), lse.data(), first, steps, stride, given.data(), nullptr);
  for (std::size_t i = 0; i < given.size(); ++i) CHECK(near(given[i], rows[i] / 2.0F, 1e-5));
}

TEST_CASE("a row's bits do not depend on the rows computed with it") {
  const prompt p = make_prompt(3, 1, 32, 70, 0, false);
  const auto run = [&](std::int64_t first, std::int64_t steps) {
    std::vector<float> rows(static_cast<std::size_t>(steps * 3 * 70));
    full_rows(p.shape, 0, p.q.data() + first * 3 * 32, p.k.data(), nullptr, first, steps, 70,
              rows.data(), nullptr);
    return rows;
  };
  const std::vector<float> all = run(0, 70);
  for (const std::int64_t t : {0, 15, 16, 33, 69}) {
    const std::vector<float> one = run(t, 1);
    CHECK(std::equal(one.begin(), one.end(), all.begin() + t * 3 * 70));
  }
}

TEST_CASE("what lies above the causal diagonal has no effect") {
  prompt p = make_prompt(4, 2, 8, 40, 0, false);
  std::vector<float> before, after, rows;
  const prompt_rows head{p.q.data(), p.k.data(), nullptr, 0, 30};
  column_sums(p.shape, 0, head, mass_layout::mean, before);
  for (std::size_t i = 30 * 2 * 8; i < p.k.size(); ++i) p.k[i] = NAN;
  column_sums(p.shape, 0, head, mass_layout::mean, after);
  CHECK(before == after);
  rows.assign(10 * 4 * 40, NAN);
  full_rows(p.shape, 0, p.q.data() + 20 * 4 * 8, p.k.data(), nullptr, 20, 10, 40, rows.data(),
            nullptr);
  for (const float x : rows) CHECK(x >= 0);

  // A large key at position 35 moves no row before it.
  prompt loud = make_prompt(4, 2, 8, 40, 0, false), quiet = loud;
  for (int c = 0; c < 16; ++c) loud.k[static_cast<std::size_t>(35 * 16 + c)] = 1e4F;
  std::vector<float> a(35 * 4 * 40), b(35 * 4 * 40);
  full_rows(loud.shape, 0, loud.q.data(), loud.k.data(), nullptr, 0, 35, 40, a.data(), nullptr);
  full_rows(quiet.shape, 0, quiet.q.data(), quiet.k.data(), nullptr, 0, 35, 40, b.data(), nullptr);
  CHECK(a == b);
}

TEST_CASE("requests that do not fit are refused") {
  const prompt p = make_prompt(2, 1, 4, 10, 0, false);
  std::vector<float> out;
  prompt_rows rows = p.rows();
  CHECK_THROWS_AS(column_sums(p.shape, 0, rows, mass_layout::per_query_head, out),
                  std::invalid_argument);
  CHECK_THROWS_AS(column_sums(p.shape, 1, rows, mass_layout::mean, out), std::out_of_range);
  rows.first_row = 4;
  CHECK_THROWS_AS(column_sums(p.shape, 0, rows, mass_layout::mean, out), std::invalid_argument);
  last_rows(p.shape, 0, {p.q.data() + 4 * 8, p.k.data(), nullptr, 4, 10}, 32, out);
  CHECK(out.size() == 6 * 2 * 10);
  CHECK_THROWS_AS(mean_of_rows(p.shape, 0, out, 5, 10, mass_layout::mean, out),
                  std::invalid_argument);
  CHECK_THROWS_AS(
      full_rows(p.shape, 0, p.q.data(), p.k.data(), nullptr, 0, 10, 9, out.data(), nullptr),
      std::invalid_argument);
}

}  // namespace
}  // namespace kvreplay::kernels
