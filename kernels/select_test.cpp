#include "kernels/select.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;
using positions = std::vector<std::int32_t>;

// n entries at positions 0 .. n-1 whose scores are those given, the older ones in the body.
kv_cache scored_cache(const std::vector<float>& scores, int window = 5) {
  kv_cache cache(small_shape(1, 1, 2), int8_format(scale_format::token, window));
  const auto n = static_cast<std::int32_t>(scores.size());
  for (std::int32_t p = 0; p < n; ++p) {
    append_one(cache, 0, p, {static_cast<float>(p), 1}, {1, static_cast<float>(p)});
    cache.head(0, 0).tail_score.back() = scores[static_cast<std::size_t>(p)];
    age(cache, 0, p);
  }
  return cache;
}

select_item item_for(kv_cache& cache, int step, const int& budget, rank_rule rule) {
  select_item item;
  item.cache = &cache;
  item.step = step;
  item.budget = &budget;
  item.rule = rule;
  return item;
}

positions kept(const std::vector<float>& scores, int budget, int sinks = 0, int recent = 0) {
  kv_cache cache = scored_cache(scores);
  select_item item = item_for(cache, static_cast<int>(scores.size()) - 1, budget, rank_rule::score);
  item.sinks = sinks;
  item.recent = recent;
  select(item);
  return cache.positions(0, 0);
}

// The rule once more, by a plain sort.
positions naive(const std::vector<float>& scores, int budget, int sinks, int recent) {
  const int n = static_cast<int>(scores.size());
  if (n <= budget) budget = n;
  positions order(static_cast<std::size_t>(n));
  for (int p = 0; p < n; ++p) order[static_cast<std::size_t>(p)] = p;
  const auto level = [&](int p) { return p < sinks ? 2 : p > n - 1 - recent ? 1 : 0; };
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    if (level(a) != level(b)) return level(a) > level(b);
    if (level(a) == 2) return a < b;
    if (level(a) == 1) return a > b;
    const float x = scores[static_cast<std::size_t>(a)], y = scores[static_cast<std::size_t>(b)];
    return x != y ? x > y : a > b;
  });
  order.resize(static_cast<std::size_t>(budget));
  std::sort(order.begin(), order.end());
  return order;
}

TEST_CASE("the rank of an entry is a total order") {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const float rising[] = {-infinity, -2.0F, -1e-40F, 0.0F, 1e-40F, 1e-9F, 1.0F, infinity};
  for (std::size_t i = 1; i < std::size(rising); ++i) {
    CHECK(rank_key(rising[i - 1], 1000) < rank_key(rising[i], 0));
  }
  CHECK(rank_key(0.0F, 3) == rank_key(-0.0F, 3));
  CHECK(rank_key(-0.0F, 4) > rank_key(0.0F, 3));
  CHECK(rank_key(1.0F, 2'000'000'000) > rank_key(1.0F, 1'999'999'999));
  CHECK_THROWS_AS(rank_key(NAN, 0), std::domain_error);
}

TEST_CASE("equal scores: the newer positions stay") {
  CHECK(kept(std::vector<float>(10, 0.5F), 5) == positions{5, 6, 7, 8, 9});
  std::vector<float> blocks;
  for (int i = 0; i < 24; ++i) blocks.push_back(static_cast<float>(6 - i / 4));
  CHECK(kept(blocks, 4 * 3 + 3) == positions{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15});
  CHECK(kept({0.0F, -0.0F, 0.0F, -0.0F}, 2) == positions{2, 3});
  CHECK(kept({-0.0F, 0.0F, -0.0F, 0.0F}, 3) == positions{1, 2, 3});
}

TEST_CASE("selection agrees with a plain sort, ties and protection included") {
  numbers random(7);
  for (int round = 0; round < 400; ++round) {
    std::vector<float> scores(static_cast<std::size_t>(1 + random.below(60)));
    const int levels = 1 + random.below(12);
    for (float& s : scores) s = static_cast<float>(random.below(levels)) / 8;
    const int budget = 1 + random.below(static_cast<int>(scores.size()) + 4);
    const int sinks = random.below(6), recent = random.below(20);
    CAPTURE(round);
    CHECK(kept(scores, budget, sinks, recent) == naive(scores, budget, sinks, recent));
  }
}

TEST_CASE("protection beyond the budget: sinks first, then the newest, and it is said") {
  const std::vector<float> flat(5, 1.0F);
  CHECK(kept(flat, 4, 0, 32) == positions{1, 2, 3, 4});
  CHECK(kept(flat, 3, 4, 0) == positions{0, 1, 2});
  CHECK(kept(flat, 3, 2, 32) == positions{0, 1, 4});
  CHECK(kept(std::vector<float>(32, 1.0F), 32, 0, 32).size() == 32);

  const auto degenerate = [&](int budget, int sinks, int recent) {
    kv_cache cache = scored_cache(flat);
    select_item item = item_for(cache, 4, budget, rank_rule::score);
    item.sinks = sinks;
    item.recent = recent;
    return select(item).degenerate;
  };
  CHECK(degenerate(4, 0, 32));
  CHECK(degenerate(3, 4, 0));
  CHECK_FALSE(degenerate(3, 3, 0));
  CHECK_FALSE(degenerate(4, 1, 2));
  CHECK_FALSE(degenerate(5, 4, 32));  // nothing has to leave
}

TEST_CASE("a budget that is not reached touches nothing") {
  kv_cache cache = scored_cache({3, 1, 2, 5, 4, 0, 7});
  const std::vector<std::int32_t> slots = cache.head(0, 0).tail_position;
  const std::vector<std::int8_t> codes = cache.head(0, 0).body_k;
  const int budget = 7;
  CHECK(select(item_for(cache, 6, budget, rank_rule::score)).evicted == 0);
  CHECK(cache.head(0, 0).tail_position == slots);
  CHECK(cache.head(0, 0).body_k == codes);
}

// Entries of the same set whose slots stand in another order: evicted one by one instead of at
// once.
kv_cache thinned(bool one_by_one) {
  std::vector<float> scores;
  for (int i = 0; i < 64; ++i) scores.push_back(static_cast<float>(i * 7 % 5));
  kv_cache cache = scored_cache(scores, 20);
  const auto drop = [](std::int32_t p) { return p % 3 == 1; };
  while (true) {
    const head_store& s = cache.head(0, 0);
    std::vector<std::uint8_t> keep(static_cast<std::size_t>(s.size()), 1);
    int marked = 0;
    for (int e = 0; e < s.size(); ++e) {
      if (!drop(s.position(e)) || (one_by_one && marked == 1)) continue;
      keep[static_cast<std::size_t>(e)] = 0;
      ++marked;
    }
    if (compact(cache, 0, 0, keep) == 0) return cache;
  }
}

TEST_CASE("what is kept depends neither on slot order nor on repetition") {
  const kv_cache ordered = thinned(false), shuffled = thinned(true);
  REQUIRE(ordered.positions(0, 0) == shuffled.positions(0, 0));
  CHECK(ordered.head(0, 0).body_position != shuffled.head(0, 0).body_position);
  for (const auto rule : {rank_rule::position, rank_rule::hash, rank_rule::score,
                          rank_rule::ema_log, rank_rule::ema_max}) {
    positions first;
    for (int repeat = 0; repeat < 50; ++repeat) {
      kv_cache cache = repeat % 2 == 0 ? ordered : shuffled;
      const int budget = 17;
      select_item item = item_for(cache, 63, budget, rule);
      item.recency = 0.3F;
      CHECK(select(item).evicted == 43 - 17);
      if (repeat == 0) first = cache.positions(0, 0);
      CHECK(cache.positions(0, 0) == first);
    }
  }
}

TEST_CASE("positions, scores, codes and scalars move together") {
  for (const bool one_by_one : {false, true}) {
    const kv_cache cache = thinned(one_by_one);
    const head_store& s = cache.head(0, 0);
    const stored_entries e = read_entries(cache, 0, 0);
    REQUIRE(s.body_k.size() == 2 * s.body_position.size());
    REQUIRE(s.tail_v.size() == 2 * s.tail_position.size());
    REQUIRE(s.body_v_scale.size() == s.body_position.size());
    for (int i = 0; i < s.size(); ++i) {
      const std::int32_t p = s.position(i);
      CHECK(s.score(i) == static_cast<float>(p * 7 % 5));
      CHECK(near(e.k[static_cast<std::size_t>(2 * i)], p, 5e-3));
      CHECK(near(e.v[static_cast<std::size_t>(2 * i + 1)], p, 5e-3));
    }
  }
}

TEST_CASE("rank rules") {
  kv_cache cache = scored_cache({1.0F, 1e-12F, unobserved_score, 0.25F, 0.5F, 0.0F});
  const int budget = 1;
  select_item item = item_for(cache, 9, budget, rank_rule::ema_log);
  item.recency = 0.25F;
  std::vector<float> scores;
  const auto at = [&](std::int32_t position) {
    const head_store& s = cache.head(0, 0);
    for (int e = 0; e < s.size(); ++e) {
      if (s.position(e) == position) return static_cast<double>(scores[static_cast<size_t>(e)]);
    }
    return static_cast<double>(NAN);
  };
  rank_scores(item, 0, scores);
  CHECK(near(at(0), 0.75 * 1 + 0.25 * 0.1, 1e-6));
  CHECK(near(at(1), 0.75 * 0 + 0.25 * 0.2, 1e-6));
  CHECK(near(at(2), 0.25 * 0.3, 1e-6));
  CHECK(near(at(3), 0.75 * (1 + std::log(0.25) / std::log(1e9)) + 0.25 * 0.4, 1e-6));
  item.rule = rank_rule::ema_max;
  rank_scores(item, 0, scores);
  CHECK(near(at(0), 0.75 + 0.025, 1e-6));
  CHECK(near(at(2), 0.075, 1e-6));
  CHECK(near(at(4), 0.75 * 0.5 + 0.125, 1e-6));

  kv_cache zeros = scored_cache({0.0F, 0.0F});
  item.cache = &zeros;
  rank_scores(item, 0, scores);
  CHECK(scores == std::vector<float>{0.25F * 0.1F, 0.25F * 0.2F});
}

TEST_CASE("the hash is uniform enough and depends on each of its arguments") {
  double sum = 0;
  for (std::int32_t p = 0; p < 20000; ++p) {
    const float h = position_hash(1, 2, 3, p);
    REQUIRE((h >= 0 && h < 1));
    sum += static_cast<double>(h);
  }
  CHECK(near(sum / 20000, 0.5, 0.01));
  const float h = position_hash(1, 2, 3, 4);
  CHECK(h == position_hash(1, 2, 3, 4));
  CHECK(h != position_hash(2, 2, 3, 4));
  CHECK(h != position_hash(1, 3, 3, 4));
  CHECK(h != position_hash(1, 2, 4, 4));
  CHECK(h != position_hash(1, 2, 3, 5));

  kv_cache cache(small_shape(2, 2, 1), {});
  numbers random(1);
  fill(cache, 0, 0, 100, random);
  const int budgets[] = {30, 30};
  select_item item = item_for(cache, 99, budgets[0], rank_rule::hash);
  kv_cache together = cache;
  CHECK(select(item).evicted == 140);
  CHECK(cache.positions(0, 0) != cache.positions(0, 1));
  item.cache = &together;
  item.one_set = true;
  select(item);
  CHECK(together.positions(0, 0) == together.positions(0, 1));
}

TEST_CASE("scores that the caller gives; a budget of 0 empties a head") {
  kv_cache cache = scored_cache({1, 2, 3, 4, 5, 6, 7});
  int budget = 2;
  select_item item = item_for(cache, 6, budget, rank_rule::given);
  const std::vector<std::vector<float>> one{{0, 9, 0, 0, 8, 0, 0}};
  CHECK_THROWS_AS(select(item), std::invalid_argument);
  item.given = one;
  CHECK(select(item).evicted == 5);
  CHECK(cache.positions(0, 0) == positions{1, 4});
  budget = 0;
  const std::vector<std::vector<float>> two{{0, 0}};
  item.given = two;
  CHECK(select(item).evicted == 2);
  CHECK(cache.entries(0, 0) == 0);
}

TEST_CASE("selection refuses NaN scores and budgets below zero") {
  kv_cache cache = scored_cache({1, 2, NAN, 4});
  int budget = 2;
  CHECK_THROWS_WITH_AS(select(item_for(cache, 3, budget, rank_rule::score)),
                       doctest::Contains("layer 0, head 0, position 2: score is nan"),
                       std::domain_error);
  budget = -1;
  CHECK_THROWS_AS(select(item_for(cache, 3, budget, rank_rule::score)), std::invalid_argument);
  CHECK_THROWS_AS(compact(cache, 0, 0, std::vector<std::uint8_t>(3, 1)), std::invalid_argument);
}

}  // namespace
}  // namespace kvreplay::kernels
