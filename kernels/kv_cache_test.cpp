#include "kernels/kv_cache.hpp"

#include <doctest/doctest.h>

#include <stdexcept>

#include "kernels/test_support.hpp"
#include "kernels/update_scores.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

TEST_CASE("a shape that cannot be is refused in one line") {
  const auto refused = [](auto change) {
    cache_shape shape = small_shape(4, 2, 64);
    storage_format format;
    change(shape, format);
    CHECK_THROWS_AS(kv_cache(shape, format), std::invalid_argument);
  };
  refused([](cache_shape& s, storage_format&) { s.layers = 0; });
  refused([](cache_shape& s, storage_format&) { s.q_heads = 33; });
  refused([](cache_shape& s, storage_format&) { s.q_heads = 3; });
  refused([](cache_shape& s, storage_format&) { s.kv_heads = 0; });
  refused([](cache_shape& s, storage_format&) { s.head_dim = 512; });
  refused([](cache_shape& s, storage_format&) { s.value_dim = 0; });
  refused([](cache_shape& s, storage_format&) { s.softmax_scale = NAN; });
  refused([](cache_shape& s, storage_format&) { s.window = {8, 8}; });
  refused([](cache_shape& s, storage_format&) { s.window = {-1}; });
  refused([](cache_shape& s, storage_format&) { s.sink_logits = {0.0F}; });
  refused([](cache_shape& s, storage_format&) { s.sink_logits = {0, 0, 0, NAN}; });
  refused([](cache_shape& s, storage_format&) {
    s.rope = rope_pairing::half;
    s.rope_dim = 7;
  });
  refused([](cache_shape& s, storage_format&) {
    s.rope = rope_pairing::interleaved;
    s.rope_dim = 66;
  });
  refused([](cache_shape&, storage_format& f) { f.tail_window = -1; });
  refused([](cache_shape&, storage_format& f) {
    f = int8_format(scale_format::channel_static, 4);
    f.static_margin = 0;
  });
}

TEST_CASE("bytes are those of what is stored") {
  cache_shape shape = small_shape(4, 2, 16, 24);
  shape.layers = 2;
  const std::int64_t d = 16 + 24;
  CHECK(payload_bytes(shape, {}, 10, 0) == 10 * 2 * d);
  CHECK(payload_bytes(shape, int8_format(scale_format::hybrid, 4), 4, 6) ==
        4 * 2 * d + 6 * (d + 4) + 4 * d);
  CHECK(payload_bytes(shape, int8_format(scale_format::token, 4), 4, 6) == 4 * 2 * d + 6 * (d + 4));
  CHECK(payload_bytes(shape, int8_format(scale_format::channel_grow, 4), 4, 6) ==
        4 * 2 * d + 6 * d + 4 * d);
  CHECK(payload_bytes(shape, int8_format(scale_format::hybrid, 4), 0, 0) == 4 * d);

  for (const auto scales : {scale_format::hybrid, scale_format::token, scale_format::channel_grow,
                            scale_format::channel_static}) {
    kv_cache cache(shape, int8_format(scales, 4));
    CHECK(cache.payload_bytes() == 4 * payload_bytes(shape, cache.format(), 0, 0));
    numbers random(1);
    fill(cache, 1, 0, 10, random);
    CHECK(cache.payload_bytes(1) == 2 * payload_bytes(shape, cache.format(), 4, 6));
    CHECK(cache.payload_bytes() ==
          cache.payload_bytes(1) + 2 * payload_bytes(shape, cache.format(), 0, 0));
    const head_store& s = cache.head(1, 1);
    const auto held = static_cast<std::int64_t>(
        2 * (s.tail_k.size() + s.tail_v.size() + s.body_k_scale.size() + s.body_v_scale.size()) +
        s.body_k.size() + s.body_v.size() +
        4 * (s.k_channel_scale.size() + s.v_channel_scale.size()));
    CHECK(cache.payload_bytes(1) == 2 * held);
    CHECK(cache.reserved_bytes() >= 2 * held);
    CHECK(cache.state_bytes(1) == 2 * 10 * 8);
    CHECK(cache.state_bytes(0) == 0);
  }
}

TEST_CASE("layers with windows hold their window, the others everything") {
  cache_shape shape = small_shape(1, 1, 4);
  shape.layers = 4;
  shape.window = {8, 0, 8, 0};
  kv_cache cache(shape, {});
  numbers random(1);
  for (int layer = 0; layer < 4; ++layer) fill(cache, layer, 0, 20, random);
  CHECK(cache.payload_bytes() == (8 + 20 + 8 + 20) * 2 * 8);
}

// One step of a policy that uses every operation.
void step(kv_cache& cache, std::int32_t t, numbers& random, std::vector<float>& log) {
  const int budget[] = {24, 24};
  fill(cache, 0, t, 1, random, false);
  const attended r = run_attend(cache, 0, random.normals(4 * 16), mass_layout::mean);
  log.insert(log.end(), r.o.begin(), r.o.end());
  const score_item scores{&cache, 0, r.mass.data(), r.stride, score_rule::ema, 0.9F};
  update_scores({&scores, 1});
  select_item item;
  item.cache = &cache;
  item.step = t;
  item.budget = budget;
  item.recent = 4;
  item.rule = rank_rule::score;
  select(item);
  age(cache, 0, t);
}

TEST_CASE("a copy is a snapshot: what follows is repeated bit by bit") {
  for (const storage_format& format :
       {int8_format(scale_format::hybrid, 8), int8_format(scale_format::channel_grow, 8),
        int4_format(8)}) {
    kv_cache cache(small_shape(4, 2, 16), format);
    numbers random(11);
    std::vector<float> ignored;
    for (std::int32_t t = 0; t < 60; ++t) step(cache, t, random, ignored);
    const kv_cache snapshot = cache;
    std::vector<float> first, second;
    numbers again = random;
    for (std::int32_t t = 60; t < 100; ++t) step(cache, t, random, first);
    const std::vector<std::int32_t> slots = cache.head(0, 1).body_position;
    const storage_events events = cache.events();
    cache = snapshot;
    for (std::int32_t t = 60; t < 100; ++t) step(cache, t, again, second);
    CHECK(first == second);
    CHECK(slots == cache.head(0, 1).body_position);
    CHECK(events.quantised == cache.events().quantised);
    CHECK(events.requantised == cache.events().requantised);
  }
}

TEST_CASE("offsets are 64 bits before the first multiply") {
  CHECK(row_offset(2'097'152, 8, 7, 128) + 127 == 2'147'484'671);
  CHECK(row_offset(3'000'000'000, 64, 63, 256) == (3'000'000'000 * 64 + 63) * 256);
}

TEST_CASE("accessors check their indices") {
  kv_cache cache(small_shape(2, 1, 4), {});
  CHECK_THROWS_AS(cache.head(1, 0), std::out_of_range);
  CHECK_THROWS_AS(cache.head(0, 1), std::out_of_range);
  CHECK_THROWS_AS(cache.head(-1, 0), std::out_of_range);
  CHECK_THROWS_AS(cache.events(1), std::out_of_range);
}

}  // namespace
}  // namespace kvreplay::kernels
