#include "kernels/payload.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cstring>
#include <limits>
#include <set>
#include <type_traits>
#include <vector>

#include "kernels/test_support.hpp"
#include "kernels/update_scores.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

std::vector<storage_format> formats() {
  storage_format wide;
  wide.tail = tail_format::fp32;
  std::vector<storage_format> all = {storage_format{}, wide};
  for (const auto scales : {scale_format::hybrid, scale_format::token, scale_format::channel_grow,
                            scale_format::channel_static, scale_format::group}) {
    all.push_back(int8_format(scales, scales == scale_format::group ? 5 : 24));
  }
  all.push_back(int4_format(7));
  all.back().tail_sinks = 2;
  return all;
}

kv_cache with_page(const cache_shape& shape, storage_format format, int page) {
  format.page = page;
  return {shape, format};
}

// One policy at one step: what it does depends on `seed` and what the cache holds alone.
void settle(kv_cache& cache, int layer, std::int32_t t, std::uint64_t seed) {
  const int kv_heads = cache.shape().kv_heads;
  std::vector<int> budget;  // per head, as a global budget gives: heads differ
  for (int h = 0; h < kv_heads; ++h) {
    budget.push_back(t % 40 == 39 ? 9 + 5 * h : 30 + 17 * h + static_cast<int>(seed % 3));
  }
  select_item item;
  item.cache = &cache;
  item.layer = layer;
  item.step = t;
  item.budget = budget.data();
  item.sinks = static_cast<int>(seed % 2);
  item.recent = 6;
  item.seed = seed;
  item.rule = seed % 3 == 0   ? rank_rule::score
              : seed % 3 == 1 ? rank_rule::ema_max
                              : rank_rule::hash;
  select(item);
  age(cache, layer, t);
}

void step(kv_cache& cache, std::int32_t t, std::uint64_t seed, attended& r) {
  numbers random(seed * 1000 + static_cast<std::uint64_t>(t));
  const cache_shape& s = cache.shape();
  for (int layer = 0; layer < s.layers; ++layer) {
    fill(cache, layer, t, 1, random, false);
    const std::vector<float> q = random.normals(std::int64_t{s.q_heads} * s.head_dim);
    attended now = run_attend(cache, layer, q, mass_layout::mean);
    const score_item scores{&cache, layer, now.mass.data(), now.stride, score_rule::ema, 0.9F};
    update_scores({&scores, 1});
    settle(cache, layer, t, seed);
    r = std::move(now);
  }
}

// Bits, NaN (what attend does not write) included.
void check_bits(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  CHECK(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// What is stored, slot by slot, without regard to where it lies.
void check_same_entries(const kv_cache& a, const kv_cache& b, int layer) {
  for (int h = 0; h < a.shape().kv_heads; ++h) {
    const head_store &x = a.head(layer, h), &y = b.head(layer, h);
    CHECK(x.tail_position == y.tail_position);
    CHECK(x.body_position == y.body_position);
    check_bits(x.tail_score, y.tail_score);
    check_bits(x.body_score, y.body_score);
    const stored_entries e = read_entries(a, layer, h), f = read_entries(b, layer, h);
    CHECK(e.k == f.k);
    CHECK(e.v == f.v);
  }
}

std::int64_t pages_for(std::int64_t rows, int page) { return (rows + page - 1) / page; }

void check_bytes(const kv_cache& paged, const kv_cache& contiguous) {
  CHECK(paged.payload_bytes() == contiguous.payload_bytes());
  CHECK(paged.state_bytes(0) == contiguous.state_bytes(0));
  const int page = paged.format().page;
  std::int64_t reserved = 0;
  for (int layer = 0; layer < paged.shape().layers; ++layer) {
    for (int h = 0; h < paged.shape().kv_heads; ++h) {
      const head_store& s = paged.head(layer, h);
      reserved += pages_for(s.tail_size(), page) * page * paged.widths().bytes(tier::tail) +
                  pages_for(s.body_size(), page) * page * paged.widths().bytes(tier::body) +
                  static_cast<std::int64_t>(
                      4 * (s.k_channel_scale.capacity() + s.v_channel_scale.capacity()) +
                      2 * (s.group_k_scale.capacity() + s.group_k_zero.capacity() +
                           s.group_v_scale.capacity()));
    }
  }
  CHECK(paged.reserved_bytes() == reserved);
}

// Every page of a layer is held once or free, and a head holds no more than it fills.
void check_pages(const kv_cache& cache, int layer) {
  for (const tier t : {tier::tail, tier::body}) {
    const auto& free = cache.free_pages(layer, t);
    std::set<std::int32_t> seen(free.begin(), free.end());
    std::size_t count = free.size();
    for (int h = 0; h < cache.shape().kv_heads; ++h) {
      const head_store& s = cache.head(layer, h);
      const auto& held = t == tier::tail ? s.tail_pages : s.body_pages;
      CHECK(static_cast<std::int64_t>(held.size()) ==
            pages_for(t == tier::tail ? s.tail_size() : s.body_size(), cache.format().page));
      seen.insert(held.begin(), held.end());
      count += held.size();
    }
    CHECK(seen.size() == count);
  }
}

TEST_CASE("pages decide where bytes lie and nothing else") {
  int n = 0;
  for (const storage_format& format : formats()) {
    for (const int page : {1, 4, 16, 64}) {
      CAPTURE(n);
      CAPTURE(page);
      cache_shape shape = small_shape(6, 2, n % 3 == 0 ? 64 : 20, n % 2 == 0 ? 0 : 36);
      shape.layers = 2;
      if (n % 3 == 1) shape.window = {0, 21};
      if (n % 4 == 2) shape.sink_logits.assign(12, 0.5F);
      kv_cache contiguous(shape, format), paged = with_page(shape, format, page);
      const auto seed = static_cast<std::uint64_t>(n++);
      attended a, b;
      for (std::int32_t t = 0; t < 130; ++t) {
        step(contiguous, t, seed, a);
        step(paged, t, seed, b);
        check_bits(a.o, b.o);
        check_bits(a.lse, b.lse);
        check_bits(a.mass, b.mass);
        if (t % 13 != 0) continue;
        for (int layer = 0; layer < 2; ++layer) {
          check_same_entries(contiguous, paged, layer);
          check_pages(paged, layer);
        }
        check_bytes(paged, contiguous);
      }
      CHECK(paged.events().requantised == contiguous.events().requantised);
      if (format.body != body_format::none && !is_grouped(format)) {
        const std::vector<float> q(static_cast<std::size_t>(shape.head_dim), 0.3F);
        CHECK(integer_scores(paged, 0, 4, q).scores == integer_scores(contiguous, 0, 4, q).scores);
      }
    }
  }
}

// Every value of a row that no entry occupies.
void poison(kv_cache& cache, float value) {
  const int page = cache.format().page;
  for (const tier t : {tier::tail, tier::body}) {
    std::vector<std::int64_t> unused;
    const auto whole_page = [&](std::int32_t p, std::int64_t from) {
      for (std::int64_t r = from; r < page; ++r) unused.push_back(std::int64_t{p} * page + r);
    };
    for (const std::int32_t p : cache.free_pages(0, t)) whole_page(p, 0);
    for (int h = 0; h < cache.shape().kv_heads; ++h) {
      const head_store& s = cache.head(0, h);
      const auto& pages = t == tier::tail ? s.tail_pages : s.body_pages;
      const int filled = (t == tier::tail ? s.tail_size() : s.body_size()) % page;
      if (filled != 0) whole_page(pages.back(), filled);
    }
    for_each_array(cache.payload(0, 0), cache.widths(), t, [&](auto& array, std::int64_t width) {
      using number = std::decay_t<decltype(array[0])>;
      const auto bad = sizeof(number) == 2 ? static_cast<number>(float_to_half(value))
                                           : static_cast<number>(value > 0 ? 99 : 0);
      for (const std::int64_t row : unused) {
        std::fill_n(array.begin() + row * width, width, bad);
      }
    });
  }
}

TEST_CASE("what lies in free pages and beyond the lengths never matters") {
  const cache_shape shape = small_shape(4, 2, 40);
  for (const storage_format& format : {int8_format(scale_format::hybrid, 13), int4_format(3)}) {
    const int page = format.body == body_format::int4 ? 4 : 16;
    attended expected;
    bool first = true;
    for (const float value : {0.0F, std::numeric_limits<float>::quiet_NaN(), 1e30F}) {
      kv_cache cache = with_page(shape, format, page);
      attended r;
      for (std::int32_t t = 0; t < 90; ++t) {
        if (t > 60) poison(cache, value);
        step(cache, t, 3, r);
      }
      if (first) expected = r;
      first = false;
      check_bits(r.o, expected.o);
      check_bits(r.lse, expected.lse);
      check_bits(r.mass, expected.mass);
    }
  }
}

TEST_CASE("lengths around a page") {
  for (const int length : {0, 1, 13, 15, 16, 17}) {
    kv_cache cache = with_page(small_shape(1, 1, 8), {}, 4);
    numbers random(5);
    fill(cache, 0, 0, length, random);
    const attended r = run_attend(cache, 0, std::vector<float>(8, 0.0F), mass_layout::mean);
    const stored_entries e = read_entries(cache, 0, 0);
    for (std::size_t c = 0; c < 8; ++c) {  // q = 0: the plain mean of the values
      double mean = 0;
      for (std::size_t i = 0; i < static_cast<std::size_t>(length); ++i) mean += e.v[8 * i + c];
      CHECK(near(static_cast<double>(r.o[c]), length == 0 ? 0 : mean / length, 1e-6));
    }
    CHECK(cache.reserved_bytes() == (length + 3) / 4 * 4 * 2 * 16);
  }
}

TEST_CASE("a page that one head gives back is the next that another takes") {
  kv_cache cache = with_page(small_shape(2, 2, 8), {}, 4);
  numbers random(1);
  fill(cache, 0, 0, 16, random);
  CHECK(cache.reserved_bytes() == 2 * 16 * 32);
  std::vector<std::uint8_t> keep(16, 0);
  keep[3] = keep[9] = keep[10] = 1;
  compact(cache, 0, 0, keep);
  CHECK(cache.free_pages(0, tier::tail).size() == 3);
  CHECK(cache.reserved_bytes() == (4 + 16) * 32);
  CHECK(cache.payload_bytes() == (3 + 16) * 32);
  fill(cache, 0, 16, 4, random);  // head 1 needs a fifth page, head 0 a second
  CHECK(cache.free_pages(0, tier::tail).size() == 1);
  check_pages(cache, 0);
}

TEST_CASE("a copy of a paged cache is a snapshot, pages included") {
  kv_cache cache = with_page(small_shape(6, 2, 20), int8_format(scale_format::hybrid, 8), 16);
  attended r;
  for (std::int32_t t = 0; t < 70; ++t) step(cache, t, 6, r);
  const kv_cache snapshot = cache;
  for (std::int32_t t = 70; t < 140; ++t) step(cache, t, 6, r);
  kv_cache again = snapshot;
  attended second;
  for (std::int32_t t = 70; t < 140; ++t) step(again, t, 6, second);
  check_bits(r.o, second.o);
  CHECK(again.head(0, 1).body_pages == cache.head(0, 1).body_pages);
  CHECK(again.free_pages(0, tier::tail) == cache.free_pages(0, tier::tail));
}

TEST_CASE("a page is a power of two") {
  for (const int page : {-16, 3, 24, 1 << 17}) {
    CHECK_THROWS_WITH_AS(with_page(small_shape(1, 1, 8), {}, page),
                         doctest::Contains(fmt::format("page is {}", page).c_str()),
                         std::invalid_argument);
  }
}

}  // namespace
}  // namespace kvreplay::kernels
