#include "kernels/attend.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <stdexcept>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

constexpr float infinity = std::numeric_limits<float>::infinity();

// A cache with one KV head, scale 1 and FP32 rows, for cases worked out by hand.
kv_cache exact_cache(int q_heads, int dim, double softmax_scale, std::vector<float> sinks = {}) {
  cache_shape shape = small_shape(q_heads, 1, dim);
  shape.softmax_scale = softmax_scale;
  shape.sink_logits = std::move(sinks);
  storage_format format;
  format.tail = tail_format::fp32;
  return kv_cache(shape, format);
}

storage_format nth_format(int i, int window) {
  switch (i % 8) {
    case 0:
      return int8_format(scale_format::hybrid, window);
    case 1:
      return {};
    case 2:
      return int8_format(scale_format::token, window);
    case 3:
      return int8_format(scale_format::channel_grow, window);
    case 4:
      return int8_format(scale_format::channel_static, window);
    case 5:
      return int8_format(scale_format::group, window);
    case 6:
      return int4_format(window);
    default: {
      storage_format f;
      f.tail = tail_format::fp32;
      return f;
    }
  }
}

TEST_CASE("attend agrees with the reference for any group, head_dim and length") {
  const int groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 16};
  const int dims[] = {1, 8, 64, 80, 96, 128, 256};
  const int lengths[] = {0, 1, 31, 32, 33, 1000};
  int n = 0;
  for (const int group : groups) {
    for (const int dim : dims) {
      for (int repeat = 0; repeat < 3; ++repeat, ++n) {
        const int length = lengths[(n + n / 6) % 6];
        const int kv_heads = length == 1000 ? 1 : 2;
        cache_shape shape = small_shape(group * kv_heads, kv_heads, dim);
        numbers random(static_cast<std::uint64_t>(n));
        if (n % 4 == 1) shape.window = {24 + n % 3};
        if (n % 5 == 2) shape.sink_logits = random.normals(shape.q_heads);
        kv_cache cache(shape, nth_format(n / 3, n % 2 == 0 ? 16 : 0));
        fill(cache, 0, 0, length, random);
        CAPTURE(group);
        CAPTURE(dim);
        CAPTURE(length);
        CAPTURE(n);
        const std::vector<float> q = random.normals(shape.q_heads * dim);
        CHECK(worst_error(cache, 0, q) <= attend_tolerance(cache, 0, q));
      }
    }
  }
}

TEST_CASE("values may have another width than keys") {
  for (const storage_format& format :
       {int8_format(scale_format::hybrid, 8), int8_format(scale_format::channel_grow, 8),
        int8_format(scale_format::group, 8), int4_format(8)}) {
    const cache_shape shape = small_shape(6, 2, 48, 100);
    kv_cache cache(shape, format);
    numbers random(3);
    fill(cache, 0, 0, 140, random);
    const std::vector<float> q = random.normals(6 * 48);
    CHECK(worst_error(cache, 0, q) <= attend_tolerance(cache, 0, q));
  }
}

TEST_CASE("very low scores are scores like others") {
  kv_cache two = exact_cache(1, 1, 1);
  append_one(two, 0, 0, {-60000}, {1});
  append_one(two, 0, 1, {-60000}, {3});
  const attended both = run_attend(two, 0, {1}, mass_layout::mean);
  CHECK(both.mass[0] == 0.5F);
  CHECK(both.mass[1] == 0.5F);
  CHECK(both.o[0] == 2.0F);
  CHECK(both.lse[0] == doctest::Approx(-60000 + std::log(2.0)));

  kv_cache one = exact_cache(1, 1, 1);
  append_one(one, 0, 0, {-70000}, {5});
  const attended single = run_attend(one, 0, {1}, mass_layout::mean);
  CHECK(single.mass[0] == 1.0F);
  CHECK(single.o[0] == 5.0F);
  CHECK(single.lse[0] == -70000.0F);
}

TEST_CASE("raw products beyond the range of float16 keep their softmax") {
  const cache_shape shape = small_shape(1, 1, 128);
  const std::vector<float> big(128, 256.0F);
  for (const int window : {8, 0}) {  // FP16, then everything INT8
    kv_cache cache(shape, int8_format(scale_format::hybrid, window));
    append_one(cache, 0, 0, big, std::vector<float>(128, 2.0F));
    age(cache, 0, 0);
    CHECK(run_attend(cache, 0, big, mass_layout::mean).mass[0] == 1.0F);
    append_one(cache, 0, 1, big, std::vector<float>(128, 4.0F));
    age(cache, 0, 1);
    const attended two = run_attend(cache, 0, big, mass_layout::mean);
    CHECK(two.mass[0] == 0.5F);
    CHECK(two.mass[1] == 0.5F);
    CHECK(two.o[5] == doctest::Approx(3.0).epsilon(1e-3));
    CHECK(two.lse[0] == doctest::Approx(256.0 * 256 * 128 / std::sqrt(128.0)).epsilon(1e-3));
  }
}

TEST_CASE("an item with nothing to attend to gives zeros wherever it stands") {
  numbers random(5);
  kv_cache full(small_shape(4, 2, 8), {}), empty(small_shape(4, 2, 8), {});
  fill(full, 0, 0, 40, random);
  const std::vector<float> q = random.normals(32);
  const attended alone = run_attend(full, 0, q, mass_layout::sum);
  for (int gap = 0; gap < 3; ++gap) {
    std::vector<attended> out(3, alone);
    std::vector<attend_item> items;
    for (int i = 0; i < 3; ++i) {
      attended& r = out[static_cast<std::size_t>(i)];
      std::fill(r.o.begin(), r.o.end(), NAN);
      std::fill(r.lse.begin(), r.lse.end(), NAN);
      items.push_back({i == gap ? &empty : &full, 0, q.data(), r.o.data(), r.lse.data(),
                       r.mass.data(), r.stride, mass_layout::sum});
    }
    attend(items);
    for (int i = 0; i < 3; ++i) {
      const attended& r = out[static_cast<std::size_t>(i)];
      if (i == gap) {
        CHECK(r.o == std::vector<float>(32, 0.0F));
        CHECK(r.lse == std::vector<float>(4, -infinity));
      } else {
        CHECK(r.o == alone.o);
        CHECK(r.lse == alone.lse);
      }
    }
  }
}

TEST_CASE("learned sinks take their share and are never renormalised away") {
  for (const int window : {128, 0}) {  // FP16, then INT8
    cache_shape shape = small_shape(2, 1, 4);
    shape.sink_logits = {0.0F, 1.0F};
    kv_cache cache(shape, int8_format(scale_format::hybrid, window));
    append_one(cache, 0, 0, {0, 0, 0, 0}, {3, 3, 3, 3});
    append_one(cache, 0, 1, {0, 0, 0, 0}, {6, 6, 6, 6});
    age(cache, 0, 1);
    const attended r =
        run_attend(cache, 0, std::vector<float>(8, 1.0F), mass_layout::per_query_head);
    CHECK(r.mass[0] == doctest::Approx(1.0 / 3));
    CHECK(r.mass[1] == doctest::Approx(1.0 / 3));
    CHECK(r.o[0] == doctest::Approx(3.0).epsilon(1e-3));
    CHECK(r.lse[0] == doctest::Approx(std::log(3.0)));
    const double second = 1 / (2 + std::exp(1.0));
    CHECK(r.mass[static_cast<std::size_t>(r.stride)] == doctest::Approx(second));
    CHECK(r.lse[1] == doctest::Approx(std::log(2 + std::exp(1.0))));
  }
  kv_cache empty = exact_cache(1, 1, 1, {0.25F});
  const attended nothing = run_attend(empty, 0, {1}, mass_layout::mean);
  CHECK(nothing.lse[0] == 0.25F);
  CHECK(nothing.o[0] == 0.0F);
}

TEST_CASE("mass layouts are reductions of the per-head rows") {
  const cache_shape shape = small_shape(6, 2, 16);
  kv_cache cache(shape, int8_format(scale_format::token, 10));
  numbers random(9);
  fill(cache, 0, 0, 37, random);
  const std::vector<float> q = random.normals(6 * 16);
  const attended heads = run_attend(cache, 0, q, mass_layout::per_query_head);
  const auto at = [&](int head, int e) {
    return static_cast<double>(heads.mass[static_cast<std::size_t>(head * heads.stride + e)]);
  };
  const attended mean = run_attend(cache, 0, q, mass_layout::mean);
  const attended most = run_attend(cache, 0, q, mass_layout::max);
  const attended sum = run_attend(cache, 0, q, mass_layout::sum);
  const attended layer = run_attend(cache, 0, q, mass_layout::layer_mean);
  for (int h = 0; h < 2; ++h) {
    for (int e = 0; e < 37; ++e) {
      const auto i = static_cast<std::size_t>(h * heads.stride + e);
      const double a = at(3 * h, e), b = at(3 * h + 1, e), c = at(3 * h + 2, e);
      CHECK(near(mean.mass[i], (a + b + c) / 3, 1e-6));
      CHECK(near(sum.mass[i], a + b + c, 1e-6));
      CHECK(near(most.mass[i], std::max({a, b, c}), 1e-6));
      double all = 0;
      for (int g = 0; g < 6; ++g) all += at(g, e);
      CHECK(near(layer.mass[i], all / 6, 1e-6));
    }
    CHECK(std::isnan(mean.mass[static_cast<std::size_t>(h * heads.stride + 37)]));
  }
}

// Leaves `pattern` in the freed room behind a vector's last element.
template <class T>
void poison(std::vector<T>& v, T pattern) {
  const std::size_t n = v.size();
  v.resize(v.capacity(), pattern);
  v.resize(n);
}

TEST_CASE("freed slots change nothing") {
  const cache_shape shape = small_shape(3, 1, 20);
  const std::vector<float> q = numbers(2).normals(60);
  std::vector<attended> results;
  for (const half_bits pattern : {half_bits{0}, half_bits{0x7e00}, half_bits{0x7bff}}) {
    kv_cache cache(shape, int8_format(scale_format::hybrid, 12));
    numbers random(1);
    for (std::int32_t t = 0; t < 90; ++t) {
      fill(cache, 0, t, 1, random);
      if (t % 30 != 29) continue;
      const std::vector<int> budget = {t == 89 ? 13 : 20};
      select_item item;
      item.cache = &cache;
      item.step = t;
      item.budget = budget.data();
      item.rule = rank_rule::hash;
      select(item);
      head_store& s = cache.head(0, 0);
      for (auto* v : {&s.tail_k, &s.tail_v, &s.body_k_scale, &s.body_v_scale}) poison(*v, pattern);
      for (auto* v : {&s.body_k, &s.body_v}) poison(*v, static_cast<std::int8_t>(pattern >> 8));
      for (auto* v : {&s.body_score, &s.tail_score}) poison(*v, NAN);
    }
    fill(cache, 0, 90, 2, random);
    CHECK(worst_error(cache, 0, q) <= attend_tolerance(cache, 0, q));
    results.push_back(run_attend(cache, 0, q, mass_layout::mean));
  }
  CHECK(results[0].o == results[1].o);
  CHECK(results[0].o == results[2].o);
  CHECK(results[0].lse == results[1].lse);
}

TEST_CASE("a query of zeros gives the plain mean of the values") {
  for (const int length : {1, 13, 257}) {
    kv_cache cache(small_shape(1, 1, 8), {});
    numbers random(4);
    fill(cache, 0, 0, length, random);
    const attended r = run_attend(cache, 0, std::vector<float>(8, 0.0F), mass_layout::none);
    const stored_entries e = read_entries(cache, 0, 0);
    double sum = 0;
    for (std::size_t i = 0; i < e.v.size(); i += 8) sum += e.v[i];
    CHECK(near(r.o[0], sum / length, 1e-6));
    CHECK(near(r.lse[0], std::log(length), 1e-6));
  }
}

TEST_CASE("attend refuses what it cannot answer") {
  kv_cache cache(small_shape(2, 2, 4), {});
  numbers random(6);
  fill(cache, 0, 0, 5, random);
  const std::vector<float> q(8, 1.0F);
  std::vector<float> o(8), lse(2), mass(10);
  attend_item item{&cache, 0, q.data(), o.data(), lse.data(), mass.data(), 4, mass_layout::mean};
  CHECK_THROWS_WITH_AS(attend({&item, 1}), doctest::Contains("stride 4, expected at least 5"),
                       std::invalid_argument);
  item.mass_stride = 5;
  item.mass = nullptr;
  CHECK_THROWS_AS(attend({&item, 1}), std::invalid_argument);
  item.mass = mass.data();
  item.layer = 1;
  CHECK_THROWS_AS(attend({&item, 1}), std::out_of_range);
  item.layer = 0;
  item.layout = mass_layout::layer_mean;
  const std::vector<std::uint8_t> keep = {1, 1, 0, 1, 1};
  compact(cache, 0, 1, keep);
  CHECK_THROWS_WITH_AS(attend({&item, 1}), doctest::Contains("4 and 5 entries"),
                       std::invalid_argument);
}

}  // namespace
}  // namespace kvreplay::kernels
