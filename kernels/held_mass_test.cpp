#include "kernels/held_mass.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

TEST_CASE("held_mass sums the recorded probabilities of the positions it is given") {
  testing::numbers random(3);
  for (const int group : {1, 3, 5}) {
    for (const int dim : {8, 20, 64}) {
      constexpr std::int64_t tokens = 70, heads = 2;
      const auto q = random.normals(std::int64_t{group} * dim);
      const auto k = random.normals(tokens * heads * dim);
      std::vector<std::int32_t> positions;
      for (std::int32_t i = 69; i >= 0; i -= 2) positions.push_back(i);  // 35: no whole blocks
      const float scale = 0.3F;
      std::vector<float> lse;
      std::vector<double> expected;
      for (int g = 0; g < group; ++g) {
        std::vector<double> weights;
        double all = 0;
        for (std::int64_t i = 0; i < tokens; ++i) {
          double score = 0;
          for (int c = 0; c < dim; ++c) {
            score += static_cast<double>(q[static_cast<std::size_t>(g * dim + c)]) *
                     static_cast<double>(k[static_cast<std::size_t>((i * heads + 1) * dim + c)]);
          }
          weights.push_back(std::exp(static_cast<double>(scale) * score));
          all += weights.back();
        }
        double held = 0;
        for (const auto i : positions) held += weights[static_cast<std::size_t>(i)];
        lse.push_back(static_cast<float>(std::log(all)));
        expected.push_back(held / all);
      }
      std::vector<double> got(static_cast<std::size_t>(group));
      held_mass(q.data(), group, dim, scale, k.data() + dim, heads * dim, positions, lse.data(),
                got.data());
      for (int g = 0; g < group; ++g) {
        const auto at = static_cast<std::size_t>(g);
        CHECK(std::fabs(got[at] - expected[at]) <= 2e-6);
      }
    }
  }
  double nothing = 1;
  const float q = 1, k = 1, lse = 0;
  held_mass(&q, 1, 1, 1, &k, 1, {}, &lse, &nothing);
  CHECK(nothing == 0);
}

}  // namespace
}  // namespace kvreplay::kernels
