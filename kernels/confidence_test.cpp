#include "kernels/confidence.hpp"

#include <doctest/doctest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <vector>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

constexpr float infinity = std::numeric_limits<float>::infinity();

double confidence_of(const std::vector<float>& logits) {
  const logit_summary s = summarise_logits(logits);
  return confidence(s.entropy, s.margin, s.top, static_cast<int>(logits.size()), {});
}

TEST_CASE("impossible tokens add nothing to the entropy and count in the vocabulary") {
  CHECK(summarise_logits(std::vector<float>{0, 0, -infinity}).entropy ==
        doctest::Approx(std::log(2.0)));
  const logit_summary one = summarise_logits(std::vector<float>{0, -infinity});
  CHECK(one.entropy == 0.0F);
  CHECK(one.margin == infinity);
  CHECK(one.top == 1.0F);
  CHECK(one.lse == 0.0F);
  const logit_summary wide = summarise_logits(std::vector<float>{65504, -65504});
  CHECK(wide.entropy == 0.0F);
  CHECK(wide.margin == 131008.0F);
  CHECK(wide.lse == 65504.0F);
}

TEST_CASE("a row that says nothing is an error") {
  CHECK_THROWS_WITH_AS(summarise_logits(std::vector<float>(3, -infinity)),
                       doctest::Contains("all logits are -inf"), std::domain_error);
  std::vector<float> row(40, 1.0F);
  row[17] = NAN;
  CHECK_THROWS_WITH_AS(summarise_logits(row), "logit 17 is nan", std::domain_error);
  row[17] = infinity;
  CHECK_THROWS_WITH_AS(summarise_logits(row), "logit 17 is +inf", std::domain_error);
  CHECK_THROWS_AS(summarise_logits({}), std::domain_error);
}

TEST_CASE("golden values of the confidence") {
  std::ifstream file(KVREPLAY_SOURCE_DIR "/kernels/testdata/confidence.json");
  const nlohmann::json cases = nlohmann::json::parse(file);
  CHECK(cases.size() == 6);
  for (const auto& [name, c] : cases.items()) {
    CAPTURE(name);
    std::vector<float> logits;
    for (const auto& x : c.at("logits")) logits.push_back(x.is_null() ? -infinity : x.get<float>());
    CHECK(near(confidence_of(logits), c.at("c").get<double>(), 1e-7));
  }
}

TEST_CASE("only the real ids count") {
  const logit_summary real = summarise_logits(std::vector<float>(50257, 2.5F));
  CHECK(near(real.entropy, 10.82491, 1e-6));
  CHECK(near(confidence(real.entropy, real.margin, real.top, 50257, {}), 0.15 + 0.3 / 50257, 1e-7));
  CHECK_FALSE(near(summarise_logits(std::vector<float>(50304, 2.5F)).entropy, 10.82491, 1e-6));
}

TEST_CASE("the lower id of equal maxima, and a margin of zero") {
  const logit_summary s = summarise_logits(std::vector<float>{1, 3, 3, 1});
  CHECK(s.argmax == 1);
  CHECK(s.margin == 0.0F);
  CHECK(summarise_logits(std::vector<float>{5, 1, 4}).margin == 1.0F);
}

TEST_CASE("sums agree with double whatever the length and the common offset") {
  numbers random(3);
  for (const int n : {1, 2, 15, 16, 17, 1023, 1024, 1025, 151936}) {
    for (const float offset : {0.0F, 500.0F, -30000.0F}) {
      std::vector<float> x = random.normals(n);
      for (float& v : x) v = 3 * v + offset;
      std::vector<float> sorted = x;
      std::sort(sorted.rbegin(), sorted.rend());
      const double top = static_cast<double>(sorted[0]);
      double z = 0, t = 0;
      for (const float v : x) {
        const double d = static_cast<double>(v) - top;
        z += std::exp(d);
        t += d * std::exp(d);
      }
      const logit_summary s = summarise_logits(x);
      CAPTURE(n);
      CAPTURE(offset);
      CHECK(near(s.entropy, std::log(z) - t / z, 3e-7));
      CHECK(near(s.top, 1 / z, 3e-7));
      CHECK(near(s.lse, top + std::log(z), 1e-7));
      if (n > 1) CHECK(s.margin == sorted[0] - sorted[1]);
      CHECK(x[static_cast<std::size_t>(s.argmax)] == sorted[0]);
    }
  }
}

TEST_CASE("confidence at its ends") {
  CHECK(confidence(0, infinity, 1, 100, {}) == doctest::Approx(1.0));
  CHECK(confidence(0, infinity, 1, 1, {}) == 1.0);
  CHECK(confidence(0.3F, 1.0F, 0.5F, 100, {1, 0, 0}) == doctest::Approx(1 - 0.3 / std::log(100.0)));
  CHECK_THROWS_AS(confidence(0, 0, 1, 0, {}), std::domain_error);
}

}  // namespace
}  // namespace kvreplay::kernels
