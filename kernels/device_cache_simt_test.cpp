// The device cache on the host emulator, step by step beside the host's operations.
#include "kernels/device_cache.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attend_device.cuh"
#include "kernels/device_arena.cuh"
#include "kernels/simt/device_copy.hpp"
#include "kernels/test_support.hpp"
#include "kernels/update_scores.hpp"

namespace kvreplay::kernels {
namespace {

using testing::at;
using testing::entries_of;
using testing::numbers;

struct cache_case {
  const char* name;
  int q_heads, kv_heads, head_dim;
  body_format body = body_format::none;
  scale_format scales = scale_format::hybrid;
  device_rules rules = {};
  int budget = 12, sinks = 0, recent = 0;
  std::vector<int> window = {};  // of each layer
  bool sink_logits = false;
  int every = 1;  // selection after every n-th step
  int prompt = 20, steps = 24;
};

constexpr int layers = 3;

cache_shape shape_of(const cache_case& c, numbers& random) {
  cache_shape shape = testing::small_shape(c.q_heads, c.kv_heads, c.head_dim);
  shape.layers = layers;
  shape.window = c.window;
  if (c.sink_logits) shape.sink_logits = random.normals(layers * c.q_heads);
  return shape;
}

storage_format format_of(const cache_case& c) {
  storage_format format = testing::int8_format(c.scales, 6);
  format.body = c.body;
  format.tail_sinks = 2;
  return format;
}

std::span<head_store> heads_of(kv_cache& cache, int layer) {
  return {&cache.head(layer, 0), at(cache.shape().kv_heads)};
}

// The prompt as the replayer loads it: calibrated, scored, selected, aged.
kv_cache loaded_cache(const cache_case& c, numbers& random) {
  kv_cache cache(shape_of(c, random), format_of(c));
  const cache_shape& s = cache.shape();
  for (int layer = 0; layer < layers; ++layer) {
    const auto k = random.normals(64 * s.kv_heads * s.head_dim), v = k;
    calibrate(cache, layer, k.data(), v.data(), 64);
    testing::fill(cache, layer, 0, c.prompt, random);
    for (int e = 0; c.rules.mass != mass_layout::none && e < cache.entries(layer, 0); ++e) {
      for (int h = 0; h < s.kv_heads; ++h) {
        const float score = 0.01F * static_cast<float>(cache.head(layer, h).position(e) % 7);
        cache.head(layer, h).set_score(e, score);
      }
    }
  }
  return cache;
}

// Rows of one step of all layers.
struct step_rows {
  step_rows(const cache_shape& s, numbers& random) {
    for (int layer = 0; layer < layers; ++layer) {
      q.push_back(random.normals(s.q_heads * s.head_dim));
      k.push_back(random.normals(s.kv_heads * s.head_dim));
      v.push_back(random.normals(s.kv_heads * s.value_dim));
      o.emplace_back(at(s.q_heads * s.value_dim), NAN);
      lse.emplace_back(at(s.q_heads), NAN);
    }
  }
  device_step item(int layer, std::int32_t position) {
    const auto l = at(layer);
    return {layer, position, q[l].data(), k[l].data(), v[l].data(), o[l].data(), lse[l].data()};
  }
  std::vector<std::vector<float>> q, k, v, o, lse;
};

// attend, update_scores on the host; the step's output and log-sum-exp.
testing::attended host_attend(kv_cache& cache, int layer, const device_step& step,
                              const device_rules& rules, const std::vector<float>& q) {
  const append_item fresh{&cache, layer, step.position, step.k, step.v};
  append({&fresh, 1});
  auto r = testing::run_attend(cache, layer, q,
                               rules.mass == mass_layout::none ? mass_layout::mean : rules.mass);
  if (rules.mass != mass_layout::none) {
    const score_item update{&cache, layer, r.mass.data(), r.stride, rules.update, rules.decay};
    update_scores({&update, 1});
  }
  return r;
}

void host_select(kv_cache& cache, const cache_case& c, int layer, std::int32_t t,
                 const std::vector<int>& budget) {
  select_item item;
  item.cache = &cache;
  item.layer = layer;
  item.model_layer = layer + 5;
  item.step = t;
  item.budget = budget.data();
  item.sinks = c.sinks;
  item.recent = c.recent;
  item.rule = c.rules.rank;
  item.recency = c.rules.recency;
  item.seed = c.rules.seed;
  item.one_set = c.rules.one_set;
  select(item);
}

std::vector<std::int32_t> sorted(std::span<const std::int32_t> positions) {
  std::vector<std::int32_t> all(positions.begin(), positions.end());
  std::sort(all.begin(), all.end());
  return all;
}

double largest_difference(const std::vector<float>& a, const std::vector<float>& b) {
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double d = std::fabs(static_cast<double>(a[i]) - static_cast<double>(b[i]));
    worst =
        d <= worst ? worst : (d > 0 ? d / (1 + std::fabs(static_cast<double>(b[i]))) : INFINITY);
  }
  return worst;
}

// Everything that came back over the run, to be compared bit by bit.
struct device_trace {
  std::vector<float> values;
  std::vector<std::int32_t> positions;
  bool operator==(const device_trace&) const = default;
};

// One run of the case beside the host. `together`: all layers in one call, else one by one.
device_trace run_case(const cache_case& c, bool together, bool compare) {
  numbers random(static_cast<std::uint64_t>(c.head_dim * 8 + c.budget));
  kv_cache host = loaded_cache(c, random);
  const cache_shape& s = host.shape();
  const auto device = open_emulated_device();
  const auto cache = device->make_cache(s, host.format(), c.rules);
  for (int layer = 0; layer < layers; ++layer) cache->load(layer, heads_of(host, layer));
  std::vector<std::int64_t> quantised(at(layers), 0);
  for (int l = 0; l < layers; ++l) quantised[at(l)] = -host.events(l).quantised;
  device_trace trace;
  const std::vector<int> budget = c.rules.one_set ? std::vector<int>(at(s.kv_heads), c.budget)
                                                  : std::vector<int>{c.budget, c.budget + 1};
  for (std::int32_t t = c.prompt; t < c.prompt + c.steps; ++t) {
    step_rows rows(s, random);
    std::vector<device_step> items;
    std::vector<device_selection> selections;
    for (int l = 0; l < layers; ++l) {
      items.push_back(rows.item(l, t));
      selections.push_back({l, l + 5, budget.data(), c.sinks, c.recent});
    }
    const bool selects = t % c.every == 0;
    const simt::scheduled with({static_cast<std::uint64_t>(together ? t : 0)});
    for (int l = 0; l < (together ? 1 : layers); ++l) {
      const std::size_t first = together ? 0 : at(l), count = together ? at(layers) : 1;
      cache->attend(std::span(items).subspan(first, count), true);
      if (selects) cache->select(std::span(selections).subspan(first, count));
    }
    for (int l = 0; l < layers; ++l) {
      trace.values.insert(trace.values.end(), rows.o[at(l)].begin(), rows.o[at(l)].end());
      trace.values.insert(trace.values.end(), rows.lse[at(l)].begin(), rows.lse[at(l)].end());
      for (int h = 0; h < s.kv_heads; ++h) {
        const auto held = sorted(cache->positions(l, h));
        trace.positions.insert(trace.positions.end(), held.begin(), held.end());
      }
      if (!compare) continue;
      CAPTURE(t);
      CAPTURE(l);
      const auto want = host_attend(host, l, items[at(l)], c.rules, rows.q[at(l)]);
      CHECK(largest_difference(rows.o[at(l)], want.o) < 5e-4);
      CHECK(largest_difference(rows.lse[at(l)], want.lse) < 5e-4);
      for (int h = 0; h < s.kv_heads; ++h) {
        CHECK(cache->counts(l, h).body == host.head(l, h).body_size());
        CHECK(cache->counts(l, h).tail == host.head(l, h).tail_size());
        CHECK(sorted(cache->positions(l, h)) == host.positions(l, h));
      }
      CHECK(cache->quantised(l) == host.events(l).quantised + quantised[at(l)]);
      if (selects) host_select(host, c, l, t, budget);
      const auto held = cache->held_positions(l);
      for (int h = 0; h < s.kv_heads; ++h) CHECK(sorted(held[at(h)]) == host.positions(l, h));
      if (t + 1 < c.prompt + c.steps) age(host, l, t);
    }
  }
  for (int l = 0; compare && l < layers; ++l) {
    std::vector<head_store> saved(at(s.kv_heads));
    cache->save(l, saved);
    for (int h = 0; h < s.kv_heads; ++h) {
      auto want = entries_of(host.head(l, h), s), got = entries_of(saved[at(h)], s);
      for (auto& [position, entry] : want) {
        CHECK(std::fabs(got[position].score - entry.score) < 1e-4F);
        got[position].score = entry.score;
      }
      CHECK(got == want);  // codes, halves, scalars and tiers to the bit
      CHECK(saved[at(h)].k_channel_scale == host.head(l, h).k_channel_scale);
    }
  }
  return trace;
}

device_rules rules(mass_layout mass, score_rule update, rank_rule rank) {
  device_rules r;
  r.mass = mass;
  r.update = update;
  r.rank = rank;
  r.decay = 0.9F;
  r.recency = 0.2F;
  r.seed = 77;
  return r;
}

std::vector<cache_case> all_cases() {
  const auto none = rules(mass_layout::none, score_rule::none, rank_rule::position);
  auto hash = none;
  hash.rank = rank_rule::hash;
  const auto sum = rules(mass_layout::mean, score_rule::sum, rank_rule::score);
  const auto most = rules(mass_layout::max, score_rule::sum, rank_rule::score);
  const auto ema = rules(mass_layout::sum, score_rule::ema, rank_rule::ema_log);
  const auto scaled = rules(mass_layout::mean, score_rule::ema, rank_rule::ema_max);
  auto last = rules(mass_layout::layer_mean, score_rule::last, rank_rule::score);
  last.one_set = true;
  const auto int8 = body_format::int8;
  return {
      {.name = "full", .q_heads = 4, .kv_heads = 2, .head_dim = 8, .rules = none, .budget = 999},
      {.name = "window", .q_heads = 4, .kv_heads = 2, .head_dim = 64, .rules = none},
      {.name = "streaming",
       .q_heads = 2,
       .kv_heads = 2,
       .head_dim = 8,
       .rules = none,
       .sinks = 4,
       .recent = 5,
       .window = {0, 15, 9}},
      {.name = "random", .q_heads = 4, .kv_heads = 2, .head_dim = 8, .rules = hash, .recent = 2},
      {.name = "h2o",
       .q_heads = 6,
       .kv_heads = 2,
       .head_dim = 8,
       .rules = sum,
       .recent = 4,
       .every = 4},
      {.name = "h2o max",
       .q_heads = 6,
       .kv_heads = 2,
       .head_dim = 64,
       .body = int8,
       .rules = most,
       .window = {0, 15, 0}},
      {.name = "tova",
       .q_heads = 6,
       .kv_heads = 2,
       .head_dim = 8,
       .rules = last,
       .window = {0, 0, 11}},
      {.name = "tova token",
       .q_heads = 4,
       .kv_heads = 2,
       .head_dim = 64,
       .body = int8,
       .scales = scale_format::token,
       .rules = last,
       .sink_logits = true},
      {.name = "confkv",
       .q_heads = 4,
       .kv_heads = 2,
       .head_dim = 64,
       .body = int8,
       .rules = ema,
       .recent = 3},
      {.name = "confkv max",
       .q_heads = 4,
       .kv_heads = 2,
       .head_dim = 128,
       .body = int8,
       .rules = scaled,
       .budget = 999,
       .sink_logits = true},
  };
}

TEST_CASE("device cache: the host's entries, scores and outputs over whole runs, however batched") {
  for (const cache_case& c : all_cases()) {
    CAPTURE(c.name);
    // The second run: another batching, and threads in order instead of drawn by seed.
    CHECK(run_case(c, true, true) == run_case(c, false, false));
  }
}

TEST_CASE("device cache: threads of a step do not race" * doctest::test_suite("races")) {
  cache_case tova = all_cases()[6];  // has every kernel, layer_mean too
  tova.steps = 1;
  run_case(tova, true, false);
}

// A cache of one layer with 20 positions loaded, and the rows of the next step.
struct small_cache {
  explicit small_cache(body_format body = body_format::none, rank_rule rank = rank_rule::position)
      : plan{"", 2, 2, 8, body},
        random(5),
        host(loaded_cache(plan, random)),
        rows(host.shape(), random) {
    device_rules by;
    by.rank = rank;
    cache = open_emulated_device()->make_cache(host.shape(), host.format(), by);
    cache->load(1, heads_of(host, 1));
  }
  std::string step_error(std::int32_t position) {
    const device_step item = rows.item(1, position);
    try {
      cache->attend({&item, 1}, false);
    } catch (const std::exception& e) {
      return e.what();
    }
    return "";
  }
  cache_case plan;
  numbers random;
  kv_cache host;
  step_rows rows;
  std::unique_ptr<device_cache> cache;
};

TEST_CASE("device cache: what cannot be stored, ranked or allocated is said in the host's words") {
  small_cache nan;
  nan.rows.k[1][8 + 3] = NAN;
  CHECK(nan.step_error(20) ==
        "append: layer 1, head 1, position 20: k channel 3 is nan, expected a finite value within "
        "the range of float16");
  small_cache large;
  large.rows.v[1][7] = 65520.0F;
  CHECK(large.step_error(20) ==
        "append: layer 1, head 0, position 20: v channel 7 is 65520, expected a finite value "
        "within the range of float16");
  small_cache edge;
  edge.rows.v[1][7] = -65519.0F;
  CHECK(edge.step_error(20).empty());
  CHECK(edge.step_error(20) == "append: layer 1, head 0, position 20: not newer than position 20");

  small_cache scored(body_format::none, rank_rule::score);
  scored.host.head(1, 0).set_score(4, NAN);
  scored.cache->load(1, heads_of(scored.host, 1));
  const int budget[] = {5, 5};
  CHECK(scored.step_error(20).empty());
  const device_selection selection{1, 1, budget, 0, 0};
  CHECK(scored.cache->select({&selection, 1}) == 2 * (21 - 5));
  CHECK(scored.step_error(21) == "select: layer 1, head 0, position 4: score is nan");

  small_cache wide(body_format::int8);
  wide.host.head(1, 0).k_channel_scale.assign(8, 1e-30F);
  wide.cache->load(1, heads_of(wide.host, 1));
  CHECK(wide.step_error(20).empty());  // 14 comes of age after it
  CHECK(wide.step_error(21) ==
        "quantise: layer 1, head 0, position 14: the row is too large for a float16 scalar over "
        "the calibrated channel scales");
  small_cache bare(body_format::int8);
  for (head_store& h : heads_of(bare.host, 1)) h.k_channel_scale.clear();
  bare.cache->load(1, heads_of(bare.host, 1));
  CHECK(bare.step_error(20).empty());
  CHECK(bare.step_error(21) ==
        "quantise: layer 1, head 0, position 14: the channel scales are not known yet");

  small_cache poor;
  const std::size_t plenty = std::exchange(device::free_memory(), std::size_t{3} << 20);
  head_store huge = poor.host.head(1, 0);
  huge.tail_position.resize(200000);
  huge.tail_score.resize(200000);
  huge.tail_k.resize(1600000);
  huge.tail_v.resize(1600000);
  const std::vector<head_store> stores{huge, huge};
  CHECK_THROWS_WITH_AS(poor.cache->load(1, stores),
                       "the cache of a layer needs 20 MiB, the device has 3 MiB free",
                       simt::failure);
  device::free_memory() = plenty;
}

TEST_CASE("device cache: what the kernels lack is refused by name") {
  const auto refusal = [](cache_shape shape, const storage_format& format) {
    try {
      open_emulated_device()->make_cache(shape, format, {});
    } catch (const std::invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  const cache_shape shape = testing::small_shape(4, 2, 8);
  storage_format format = testing::int8_format(scale_format::hybrid, 4);
  CHECK(refusal(shape, format).empty());
  format.scales = scale_format::channel_grow;
  CHECK(refusal(shape, format) == "the device kernels have no scales per channel or group");
  format.body = body_format::none;
  CHECK(refusal(shape, format).empty());
  format.tail = tail_format::fp32;
  CHECK(refusal(shape, format) == "the device kernels have no FP32 tails");
  format.tail = tail_format::fp16;
  CHECK(refusal(testing::small_shape(4, 2, 512), format) ==
        "the device kernels have no heads of more than 256 channels");
  format.page = 16;
  CHECK(refusal(shape, format) == "the device kernels have no paged layout");
  format.page = 0;
  CHECK(refusal(testing::small_shape(129, 1, 8), format) ==
        "the device kernels have no groups of more than 128 query heads");
}

TEST_CASE("device cache: a clock hears of every kernel") {
  small_cache timed;
  std::vector<std::string> heard;
  timed.cache->time_kernels([&](std::string_view kernel, double us) {
    heard.emplace_back(kernel);
    CHECK(us >= 0);
  });
  CHECK(timed.step_error(20).empty());
  const int budget[] = {5, 50};
  const device_selection selection{1, 1, budget, 0, 0};
  timed.cache->select({&selection, 1});
  CHECK(heard.size() == 2);
  timed.cache->synchronise();
  CHECK(heard.size() == 4);
  timed.cache->held_positions(1);
  CHECK(heard == std::vector<std::string>{"append", "attend", "select", "compact", "positions"});
  CHECK(timed.cache->reserved_bytes() > 0);
}

TEST_CASE("device cache: places beyond 2^31 bytes are where they should be") {
  const device::head_layout l = device::layout_of({2'097'153, 2'097'153}, 128, 128);
  constexpr std::int64_t rows = 2'097'168;  // a multiple of 16
  const auto whole = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
  CHECK(l.body_v == rows * 128);
  CHECK(l.tail_k == 2 * rows * 128 + 2 * whole(rows * 2) + 2 * whole(rows * 4));
  CHECK(l.tail_v - l.tail_k == std::int64_t{2'097'153} * 256);
  CHECK(l.bytes * 7 > std::int64_t{1} << 33);
  device::attend_batch a;
  a.group = 8;
  a.splits = 8192;
  CHECK(device::partial_row(a, 69'999, 8191, 7) == std::int64_t{70'000} * 8192 * 8 - 1);
}

}  // namespace
}  // namespace kvreplay::kernels
