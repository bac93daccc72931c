#include "kernels/rerotate.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernels/append.hpp"
#include "kernels/entry_rows.hpp"
#include "kernels/quantise.hpp"
#include "kernels/select.hpp"
#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

constexpr double w = 0.3;

cache_shape turning_shape(rope_pairing pairing, int dim = 2) {
  cache_shape s;
  s.layers = s.q_heads = s.kv_heads = 1;
  s.head_dim = dim;
  s.value_dim = 1;
  s.rope = pairing;
  return s;
}

// Keys are the unit vector (1, 0) rotated at positions 0 .. 9; {0,1,2,3,6,7,8} and the newest stay.
kv_cache with_gaps(rope_pairing pairing) {
  storage_format exact;
  exact.tail = tail_format::fp32;
  kv_cache cache(turning_shape(pairing), exact);
  for (int p = 0; p < 10; ++p) {
    const float k[] = {static_cast<float>(std::cos(p * w)), static_cast<float>(std::sin(p * w))};
    const float v[] = {static_cast<float>(p)};
    const append_item item{&cache, 0, p, k, v};
    append({&item, 1});
  }
  compact(cache, 0, 0, std::vector<std::uint8_t>{1, 1, 1, 1, 0, 0, 1, 1, 1, 1});
  return cache;
}

TEST_CASE("a query sees in-cache distances") {
  for (const auto pairing : {rope_pairing::half, rope_pairing::interleaved}) {
    const kv_cache cache = with_gaps(pairing);
    REQUIRE(has_gaps(cache, 0));
    const std::vector<double> frequency{w};
    const kv_cache turned = rerotated(cache, 0, frequency);
    const auto keys = entry_keys(turned, 0, 0), values = entry_values(turned, 0, 0);
    // The query at position 9, which is the eighth of eight entries.
    const double q[] = {std::cos(9 * w), std::sin(9 * w)};
    const int text[] = {0, 1, 2, 3, 6, 7, 8, 9};
    for (size_t e = 0; e < 8; ++e) {
      const auto rank = std::find(text, text + 8, static_cast<int>(values[e])) - text;
      const double score = q[0] * keys[2 * e] + q[1] * keys[2 * e + 1];
      CHECK(score == doctest::Approx(std::cos(static_cast<double>(7 - rank) * w)).epsilon(1e-6));
    }
  }
}

TEST_CASE("keys that do not move keep their bits, and their order everywhere") {
  const kv_cache cache = with_gaps(rope_pairing::half);
  const std::vector<double> frequency{w};
  const kv_cache turned = rerotated(cache, 0, frequency);
  const auto before = entry_keys(cache, 0, 0), after = entry_keys(turned, 0, 0);
  const head_store& store = cache.head(0, 0);
  int still = 0;
  for (int e = 0; e < store.size(); ++e) {
    if (store.position(e) < 6) continue;
    ++still;
    CHECK(before[static_cast<size_t>(2 * e)] == after[static_cast<size_t>(2 * e)]);
    CHECK(before[static_cast<size_t>(2 * e + 1)] == after[static_cast<size_t>(2 * e + 1)]);
  }
  CHECK(still == 4);
  CHECK(entry_values(cache, 0, 0) == entry_values(turned, 0, 0));
}

TEST_CASE("no gaps, no rotary pairs, wrong frequencies") {
  kv_cache cache(turning_shape(rope_pairing::half), {});
  append_one(cache, 0, 4, {1, 0}, {1});
  append_one(cache, 0, 5, {1, 0}, {1});
  CHECK_FALSE(has_gaps(cache, 0));
  append_one(cache, 0, 7, {1, 0}, {1});
  CHECK(has_gaps(cache, 0));
  CHECK_THROWS_AS(rerotated(cache, 0, std::vector<double>{}), std::invalid_argument);
  kv_cache plain(turning_shape(rope_pairing::none), {});
  CHECK_THROWS_AS(rerotated(plain, 0, std::vector<double>{w}), std::invalid_argument);
}

TEST_CASE("entries read as attention sees them, in every format") {
  storage_format formats[8];
  formats[1].tail = tail_format::fp32;
  for (int i = 2; i < 8; ++i) {
    formats[i].body = i == 7 ? body_format::int4 : body_format::int8;
    formats[i].tail_window = 3;
  }
  formats[3].scales = scale_format::token;
  formats[4].scales = scale_format::channel_grow;
  formats[5].scales = scale_format::group;
  formats[6].page = 4;
  for (const auto& format : formats) {
    CAPTURE(static_cast<int>(&format - formats));
    cache_shape shape = turning_shape(rope_pairing::none, 8);
    shape.value_dim = 4;
    kv_cache cache(shape, format);
    numbers random(5);
    std::vector<std::vector<float>> k, v;
    for (int p = 0; p < 90; ++p) {
      k.push_back(random.normals(8));
      v.push_back(random.normals(4));
      append_one(cache, 0, p, k.back(), v.back());
      age(cache, 0, p);
    }
    const auto keys = entry_keys(cache, 0, 0), values = entry_values(cache, 0, 0);
    const double allowed = format.body == body_format::none   ? 4e-3
                           : format.body == body_format::int8 ? 0.06
                                                              : 0.5;
    const head_store& store = cache.head(0, 0);
    REQUIRE(keys.size() == 90 * 8);
    for (int e = 0; e < 90; ++e) {
      const auto p = static_cast<size_t>(store.position(e));
      for (size_t c = 0; c < 8; ++c) {
        CHECK(std::fabs(keys[static_cast<size_t>(e) * 8 + c] - k[p][c]) <= allowed);
      }
      for (size_t c = 0; c < 4; ++c) {
        CHECK(std::fabs(values[static_cast<size_t>(e) * 4 + c] - v[p][c]) <= allowed);
      }
    }
  }
}

}  // namespace
}  // namespace kvreplay::kernels
