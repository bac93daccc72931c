#include "kernels/append.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <stdexcept>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

std::vector<std::int32_t> range(std::int32_t first, std::int32_t last) {
  std::vector<std::int32_t> all;
  for (std::int32_t p = first; p <= last; ++p) all.push_back(p);
  return all;
}

kv_cache windowed(int window, storage_format format = {}) {
  cache_shape shape = small_shape(1, 1, 4);
  shape.window = {window};
  return kv_cache(shape, format);
}

TEST_CASE("a window counts the newcomer and drops one entry a step once it is full") {
  numbers random(1);
  kv_cache cache = windowed(8);
  fill(cache, 0, 0, 8, random);
  CHECK(cache.positions(0, 0) == range(0, 7));
  fill(cache, 0, 8, 1, random);
  CHECK(cache.positions(0, 0) == range(1, 8));
  fill(cache, 0, 9, 1, random);
  CHECK(cache.positions(0, 0) == range(2, 9));

  kv_cache one = windowed(1);
  fill(one, 0, 0, 5, random);
  CHECK(one.positions(0, 0) == range(4, 4));

  kv_cache wide = windowed(100);
  fill(wide, 0, 0, 20, random);
  CHECK(wide.positions(0, 0) == range(0, 19));
}

TEST_CASE("the window passes over both tiers") {
  numbers random(2);
  kv_cache cache = windowed(8, int8_format(scale_format::token, 3));
  fill(cache, 0, 0, 30, random);
  CHECK(cache.positions(0, 0) == range(22, 29));
  CHECK(cache.head(0, 0).body_size() == 5);
  CHECK(cache.events().quantised == 27);
}

TEST_CASE("a position jump drops everything that the window has passed") {
  numbers random(3);
  kv_cache cache = windowed(8);
  fill(cache, 0, 0, 8, random);
  fill(cache, 0, 12, 1, random);
  CHECK(cache.positions(0, 0) == std::vector<std::int32_t>{5, 6, 7, 12});
}

TEST_CASE("rows are stored rounded to the nearest float16, scores unobserved") {
  kv_cache cache(small_shape(1, 1, 2), {});
  append_one(cache, 0, 7, {1.0F + 0x1p-11F, 1.0F + 3 * 0x1p-11F}, {65504.0F, -0x1p-24F});
  const head_store& s = cache.head(0, 0);
  CHECK(half_value(s.tail_k[0]) == 1.0);           // a tie: to even
  CHECK(half_value(s.tail_k[1]) == 1.0 + 0x1p-9);  // a tie: to even
  CHECK(half_value(s.tail_v[0]) == 65504.0);
  CHECK(half_value(s.tail_v[1]) == -0x1p-24);
  CHECK(s.tail_score[0] == unobserved_score);
}

TEST_CASE("what cannot be stored is named with layer, head and position") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  cache_shape shape = small_shape(2, 2, 2);
  shape.layers = 2;
  kv_cache cache(shape, {});
  const std::vector<float> fine(4, 1.0F);
  for (const float bad : {NAN, infinity, -infinity, 65520.0F, -70000.0F}) {
    std::vector<float> k = fine;
    k[3] = bad;
    CHECK_THROWS_WITH_AS(append_one(cache, 1, 5, k, fine),
                         doctest::Contains("layer 1, head 1, position 5: k channel 1"),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(append_one(cache, 1, 5, fine, k), doctest::Contains("v channel 1"),
                         std::invalid_argument);
  }
  CHECK(cache.entries(1, 0) == 0);  // nothing was stored by halves
  append_one(cache, 1, 5, fine, std::vector<float>(4, 65519.0F));
  CHECK(half_value(cache.head(1, 0).tail_v[0]) == 65504.0);
  CHECK_THROWS_WITH_AS(append_one(cache, 1, 5, fine, fine), doctest::Contains("not newer"),
                       std::invalid_argument);
  CHECK_THROWS_AS(append_one(cache, 0, -1, fine, fine), std::invalid_argument);
  CHECK_THROWS_AS(append_one(cache, 2, 6, fine, fine), std::out_of_range);

  storage_format wide;
  wide.tail = tail_format::fp32;
  kv_cache full(shape, wide);
  append_one(full, 0, 0, std::vector<float>(4, 1e30F), fine);
  CHECK(full.head(0, 0).tail_k32[0] == 1e30F);
  CHECK_THROWS_AS(append_one(full, 0, 1, std::vector<float>(4, infinity), fine),
                  std::invalid_argument);
}

}  // namespace
}  // namespace kvreplay::kernels
