#include "kernels/numerics.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <vector>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

TEST_CASE("every float16 pattern converts exactly, and back") {
  int wrong = 0;
  for (int i = 0; i < 65536; ++i) {
    const auto h = static_cast<half_bits>(i);
    const float x = half_to_float(h);
    if (!is_finite_half(h)) {
      const bool is_nan = (h & 0x3ff) != 0;
      wrong += is_nan ? !std::isnan(x) : x != (i < 0x8000 ? INFINITY : -INFINITY);
      continue;
    }
    wrong += x != half_value(h) || std::signbit(x) != (i >= 0x8000) || float_to_half(x) != h;
  }
  CHECK(wrong == 0);
}

TEST_CASE("exp_float is e^x to a few units in the last place") {
  double worst = 0;
  for (double x = -87; x <= 88; x += 0.00371) {
    const auto f = static_cast<float>(x);
    const double want = std::exp(static_cast<double>(f));
    worst = std::max(worst, std::fabs(exp_float(f) - want) / want);
  }
  CHECK(worst < 3e-7);
  CHECK(exp_float(0.0F) == 1.0F);
  CHECK(exp_float(-88.0F) == 0.0F);
  CHECK(exp_float(-3e38F) == 0.0F);
  CHECK(exp_float(-std::numeric_limits<float>::infinity()) == 0.0F);
  CHECK(std::isnan(exp_float(NAN)));
}

TEST_CASE("sums, maxima and roundings of any length") {
  numbers random(1);
  for (int n = 0; n < 70; ++n) {
    const std::vector<float> a = random.normals(n), b = random.normals(n);
    double product = 0, sum = 0;
    float largest = very_negative;
    for (std::size_t i = 0; i < a.size(); ++i) {
      product += static_cast<double>(a[i]) * static_cast<double>(b[i]);
      sum += static_cast<double>(a[i]);
      largest = std::max(largest, a[i]);
    }
    float together[4], alone = 0;
    std::vector<float> rows = b;
    for (int r = 1; r < 4; ++r) rows.insert(rows.end(), b.begin(), b.end());
    dot_rows<4>(a.data(), rows.data(), n, together);
    dot_rows<1>(a.data(), b.data(), n, &alone);
    CHECK(near(alone, product, 1e-5));
    for (const float x : together) CHECK(x == alone);
    CHECK(near(row_sum(a.data(), n), sum, 1e-12));
    CHECK(row_max(a.data(), n, very_negative) == largest);
  }
  CHECK(round_even(0.5F) == 0.0F);
  CHECK(round_even(1.5F) == 2.0F);
  CHECK(round_even(-2.5F) == -2.0F);
  CHECK(round_even(126.6F) == 127.0F);
}

TEST_CASE("the reference on a case worked out by hand") {
  const std::vector<double> q = {2}, k = {0, std::log(3.0)}, v = {1, 10, 5, 20};
  const reference_result r = reference_attend(q, k, v, 2, 0.5, nullptr);
  CHECK(r.mass[0] == doctest::Approx(0.25));
  CHECK(r.o[0] == doctest::Approx(0.25 * 1 + 0.75 * 5));
  CHECK(r.o[1] == doctest::Approx(0.25 * 10 + 0.75 * 20));
  CHECK(r.lse == doctest::Approx(std::log(4.0)));
  const double sink = 0;
  CHECK(reference_attend(q, k, v, 2, 0.5, &sink).mass[1] == doctest::Approx(0.6));
  CHECK(reference_attend(q, {}, {}, 2, 0.5, nullptr).lse == -INFINITY);
  CHECK_THROWS(reference_attend(q, k, k, 2, 0.5, nullptr));
}

}  // namespace
}  // namespace kvreplay::kernels
