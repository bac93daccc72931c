// select and compact of the device on the host emulator against the host's.
#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/compact_device.cuh"
#include "kernels/select_device.cuh"
#include "kernels/simt/device_copy.hpp"
#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using device::compact_batch;
using device::compact_head;
using device::select_batch;
using device::select_head;
using testing::at;
using testing::entries_of;
using testing::head_copy;
using testing::numbers;

// A cache whose scores repeat often, so that ties decide.
kv_cache scored_cache(int entries, int window, numbers& random) {
  kv_cache cache(testing::small_shape(4, 2, 16, 24),
                 testing::int8_format(scale_format::hybrid, window));
  testing::fill(cache, 0, 0, entries, random);
  for (int h = 0; h < 2; ++h) {
    for (int e = 0; e < cache.entries(0, h); ++e) {
      const int kind = random.below(8);
      cache.head(0, h).set_score(e, kind == 0 ? -0.0F : static_cast<float>(kind) / 8 - 0.25F);
    }
  }
  return cache;
}

// The device's select and compact of every head; returns how many heads differ from the host's.
int differing_heads(const kv_cache& before, const select_item& rules,
                    const std::vector<int>& budget, std::uint64_t seed) {
  kv_cache after = before;
  select_item item = rules;
  item.cache = &after;
  item.budget = budget.data();
  select(item);
  const cache_shape& shape = before.shape();
  const int most = before.max_entries(0);
  std::vector<head_copy> copies;
  copies.reserve(at(shape.kv_heads));
  std::vector<std::vector<std::uint8_t>> keep(at(shape.kv_heads));
  std::vector<std::vector<int>> work(at(shape.kv_heads));
  std::vector<select_head> selects;
  std::vector<compact_head> compacts;
  for (int h = 0; h < shape.kv_heads; ++h) {
    copies.emplace_back(before.head(0, h), shape, 3);
    keep[at(h)].assign(at(most), 7);
    work[at(h)].assign(at(2 * most), -1);
    selects.push_back({&copies[at(h)].storage, keep[at(h)].data(), budget[at(h)], rules.model_layer,
                       h, rules.sinks, rules.recent});
    compacts.push_back({&copies[at(h)].storage, keep[at(h)].data(), work[at(h)].data()});
  }
  const simt::scheduled with({seed});
  select_batch batch{selects.data(), shape.kv_heads, rules.step,
                     rules.rule,     rules.recency,  rules.seed};
  launch_select(batch, {});
  launch_compact(
      compact_batch{compacts.data(), shape.kv_heads, shape.head_dim, shape.value_dim, most}, {});
  int differing = 0;
  for (int h = 0; h < shape.kv_heads; ++h) {
    const device::head_storage& s = copies[at(h)].storage;
    const bool same = entries_of(after.head(0, h), shape) == entries_of(s, shape);
    differing += same && s.fault == 0 && s.body + s.tail == after.entries(0, h) ? 0 : 1;
  }
  return differing;
}

TEST_CASE("device select and compact: the host's choice under every rule, budget and schedule") {
  for (const int n : {1, 31, 32, 33, 150, 700}) {
    numbers random(static_cast<std::uint64_t>(n));
    const kv_cache cache = scored_cache(n, 20, random);
    for (const rank_rule rule : {rank_rule::position, rank_rule::hash, rank_rule::score,
                                 rank_rule::ema_log, rank_rule::ema_max}) {
      for (const int budget : {1, n / 2 + 1, n - 1, n + 5}) {
        if (budget < 1) continue;
        select_item rules;
        rules.model_layer = 3;
        rules.step = n - 1;
        rules.sinks = 2;
        rules.recent = 5;
        rules.rule = rule;
        rules.seed = 99;
        rules.recency = 0.3F;
        CAPTURE(n);
        CAPTURE(budget);
        CHECK(differing_heads(cache, rules, {budget, budget + 1}, static_cast<std::uint64_t>(n)) ==
              0);
      }
    }
  }
}

TEST_CASE("device select: where protection alone exceeds the budget, sinks stay, then the newest" *
          doctest::test_suite("races")) {
  numbers random(6);
  const kv_cache cache = scored_cache(60, 10, random);
  select_item rules;
  rules.step = 59;
  rules.sinks = 6;
  rules.recent = 30;
  rules.rule = rank_rule::score;
  for (const int budget : {1, 4, 6, 7, 20, 35, 36, 37}) {
    CAPTURE(budget);
    CHECK(differing_heads(cache, rules, {budget, budget}, 4) == 0);
  }
}

TEST_CASE("device window: marks what the layer's window keeps, in both tiers") {
  numbers random(8);
  const kv_cache cache = scored_cache(50, 10, random);
  head_copy copy(cache.head(0, 0), cache.shape(), 0);
  for (const int window : {1, 10, 11, 49, 50, 500}) {
    std::vector<std::uint8_t> keep(50, 7);
    const device::window_head head = {&copy.storage, keep.data(), window};
    launch_window(device::window_batch{&head, 1, 49}, {});
    int wrong = 0;
    for (int e = 0; e < 50; ++e) {
      wrong += keep[at(e)] == (cache.head(0, 0).position(e) > 49 - window ? 1 : 0) ? 0 : 1;
    }
    CAPTURE(window);
    CHECK(wrong == 0);
  }
}

TEST_CASE("device select: a score that is nan is a fault and nothing leaves") {
  numbers random(7);
  kv_cache cache = scored_cache(40, 10, random);
  cache.head(0, 0).set_score(3, NAN);
  head_copy copy(cache.head(0, 0), cache.shape(), 0);
  std::vector<std::uint8_t> keep(40, 0);
  const select_head head = {&copy.storage, keep.data(), 10, 0, 0, 0, 0};
  launch_select(select_batch{&head, 1, 39, rank_rule::score, 0, 0}, {});
  CHECK(copy.storage.fault == device::fault_score_is_nan);
  CHECK(keep == std::vector<std::uint8_t>(40, 1));
}

TEST_CASE("device select and compact: batches that cannot be are refused") {
  CHECK_THROWS_AS(launch_select(select_batch{}, {}), simt::failure);
  const select_head head;
  CHECK_THROWS_WITH_AS(launch_select(select_batch{&head, 1, 0, rank_rule::ema_log, 2, 0}, {}),
                       "select on the device: recency is not in 0..1", simt::failure);
  CHECK_THROWS_AS(launch_window(device::window_batch{}, {}), simt::failure);
  CHECK_THROWS_AS(launch_compact(compact_batch{}, {}), simt::failure);
}

}  // namespace
}  // namespace kvreplay::kernels
