#include "kernels/update_scores.hpp"

#include <doctest/doctest.h>

#include <stdexcept>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

kv_cache two_entries() {
  kv_cache cache(small_shape(1, 1, 1), int8_format(scale_format::token, 1));
  append_one(cache, 0, 3, {1}, {1});
  append_one(cache, 0, 5, {1}, {1});
  age(cache, 0, 5);  // position 3 in the body, 5 in the tail
  return cache;
}

void observe(kv_cache& cache, score_rule rule, std::vector<float> mass, float decay = 0.75F) {
  const score_item item{&cache, 0,    mass.data(), static_cast<std::int64_t>(mass.size()),
                        rule,   decay};
  update_scores({&item, 1});
}

TEST_CASE("the first observation sets the score in every rule") {
  for (const auto rule : {score_rule::sum, score_rule::ema, score_rule::last}) {
    kv_cache cache = two_entries();
    observe(cache, rule, {0.25F, 0.75F});
    CHECK(cache.head(0, 0).score(0) == 0.25F);
    CHECK(cache.head(0, 0).score(1) == 0.75F);
  }
}

TEST_CASE("later observations follow the rule, in both tiers") {
  kv_cache sum = two_entries(), ema = two_entries(), last = two_entries(), none = two_entries();
  for (int i = 0; i < 2; ++i) {
    const std::vector<float> mass =
        i == 0 ? std::vector<float>{0.5F, 1.0F} : std::vector<float>{0.25F, 0.0F};
    observe(sum, score_rule::sum, mass);
    observe(ema, score_rule::ema, mass);
    observe(last, score_rule::last, mass);
    observe(none, score_rule::none, mass);
  }
  CHECK(sum.head(0, 0).body_score[0] == 0.75F);
  CHECK(sum.head(0, 0).tail_score[0] == 1.0F);
  CHECK(ema.head(0, 0).body_score[0] == 0.75F * 0.5F + 0.25F * 0.25F);
  CHECK(ema.head(0, 0).tail_score[0] == 0.75F);
  CHECK(last.head(0, 0).body_score[0] == 0.25F);
  CHECK(last.head(0, 0).tail_score[0] == 0.0F);
  CHECK(none.head(0, 0).body_score[0] == unobserved_score);
}

TEST_CASE("small observations are not lost beside large ones") {
  kv_cache cache = two_entries();
  observe(cache, score_rule::sum, {0.0F, 1.0F});
  for (int i = 0; i < 65536; ++i) observe(cache, score_rule::sum, {1e-4F, 0.0F});
  CHECK(near(cache.head(0, 0).score(0), 6.5536, 1e-3));
  const std::vector<std::uint64_t> keys = {rank_key(cache.head(0, 0).score(0), 3),
                                           rank_key(cache.head(0, 0).score(1), 5)};
  CHECK(keys[0] > keys[1]);
}

TEST_CASE("a mass that cannot be is named") {
  kv_cache cache = two_entries();
  for (const float bad : {NAN, -0.5F, INFINITY}) {
    CHECK_THROWS_WITH_AS(observe(cache, score_rule::sum, {0.5F, bad}),
                         doctest::Contains("layer 0, head 0, position 5"), std::domain_error);
  }
  CHECK(cache.head(0, 0).score(0) == unobserved_score);
  CHECK_THROWS_AS(observe(cache, score_rule::sum, {0.5F}), std::invalid_argument);
}

}  // namespace
}  // namespace kvreplay::kernels
