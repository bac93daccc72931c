// The device's attend on the host emulator against the double reference over what a cache stores.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attend_launch.cuh"
#include "kernels/query_digits.hpp"
#include "kernels/simt/device_copy.hpp"
#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using device::attend_batch;
using device::attend_head;
using device::attend_tier;
using testing::at;
using testing::head_copy;
using testing::numbers;

struct device_run {
  std::vector<float> o, lse, mass, scores;
  std::vector<float> new_scores;  // [kv_heads, most]
  int most = 0;
};

struct run_options {
  attend_tier tier = attend_tier::automatic;
  int splits = 1;
  mass_layout reduce = mass_layout::per_query_head;
  score_rule rule = score_rule::none;
  float decay = 0;
};

// mass [kv_heads, most], or [q_heads, most] per query head.
device_run run(const kv_cache& cache, const std::vector<float>& q, const run_options& options) {
  const cache_shape& s = cache.shape();
  device_run r;
  r.most = std::max(1, cache.max_entries(0));
  r.o.assign(at(s.q_heads * s.value_dim), NAN);
  r.lse.assign(at(s.q_heads), NAN);
  r.mass.assign(at(s.q_heads * r.most), NAN);
  r.scores.assign(at(s.q_heads * r.most), NAN);
  std::vector<head_copy> copies;
  std::vector<attend_head> heads;
  const int group = s.group();
  const bool per_head = options.reduce == mass_layout::per_query_head;
  copies.reserve(at(s.kv_heads));  // their storage points into themselves
  for (int h = 0; h < s.kv_heads; ++h) copies.emplace_back(cache.head(0, h), s, 0);
  for (int h = 0; h < s.kv_heads; ++h) {
    attend_head view;
    view.storage = &copies[at(h)].storage;
    view.q = q.data() + std::int64_t{h} * group * s.head_dim;
    view.sink = s.sink_logits.empty() ? nullptr : s.sink_logits.data() + h * group;
    view.o = r.o.data() + std::int64_t{h} * group * s.value_dim;
    view.lse = r.lse.data() + h * group;
    view.mass = r.mass.data() + std::int64_t{h} * (per_head ? group : 1) * r.most;
    heads.push_back(view);
  }
  std::vector<float> partial_o(at(std::int64_t{s.q_heads} * options.splits * s.value_dim), NAN);
  std::vector<float> partial_state(at(std::int64_t{s.q_heads} * options.splits * 2), NAN);
  attend_batch batch;
  batch.heads = heads.data();
  batch.head_count = s.kv_heads;
  batch.group = group;
  batch.head_dim = s.head_dim;
  batch.value_dim = s.value_dim;
  batch.softmax_scale = static_cast<float>(s.softmax_scale);
  batch.splits = options.splits;
  batch.most_entries = r.most;
  batch.reduce = options.reduce;
  batch.mass_stride = r.most;
  batch.rule = options.rule;
  batch.decay = options.decay;
  batch.scores = r.scores.data();
  batch.partial_o = partial_o.data();
  batch.partial_state = partial_state.data();
  launch_attend(batch, options.tier, {});
  for (const head_copy& c : copies) {
    for (int e = 0; e < c.storage.body; ++e) r.new_scores.push_back(c.storage.body_score[e]);
    for (int e = 0; e < c.storage.tail; ++e) r.new_scores.push_back(c.storage.tail_score[e]);
  }
  return r;
}

// The largest error of o, lse and mass in units of 1 + |expected|; infinite for NaN.
double worst_error(const kv_cache& cache, const std::vector<float>& q, const device_run& got) {
  const cache_shape& s = cache.shape();
  double worst = 0;
  const auto see = [&worst](double a, double b) {
    const double error = a == b ? 0 : std::fabs(a - b) / (1 + std::fabs(b));
    if (!(error <= worst)) worst = error >= 0 ? error : INFINITY;
  };
  for (int h = 0; h < s.q_heads; ++h) {
    const reference_result want = testing::expected(cache, 0, q, h);
    see(got.lse[at(h)], want.lse);
    for (int c = 0; c < s.value_dim; ++c) see(got.o[at(h * s.value_dim + c)], want.o[at(c)]);
    for (std::size_t i = 0; i < want.mass.size(); ++i) {
      see(got.mass[at(h * got.most) + i], want.mass[i]);
    }
  }
  return worst;
}

// entries in all, of which the newest `window` are in the tail; KV head 1 holds a few less.
kv_cache make_cache(const cache_shape& shape, int entries, int window, numbers& random,
                    scale_format scales = scale_format::hybrid) {
  kv_cache cache(shape, testing::int8_format(scales, window));
  testing::fill(cache, 0, 0, entries, random);
  if (shape.kv_heads > 1 && entries > 3) {
    std::vector<std::uint8_t> keep(at(entries), 1);
    keep[0] = keep[at(entries - 1)] = keep[at(entries / 2)] = 0;
    compact(cache, 0, 1, keep);
  }
  return cache;
}

TEST_CASE("device attend, FP32 tier: odd shapes against the double reference") {
  struct shape_case {
    int q_heads, kv_heads, head_dim, value_dim;
  };
  for (const shape_case c : {shape_case{1, 1, 1, 1}, shape_case{3, 1, 33, 7},
                             shape_case{10, 2, 80, 80}, shape_case{2, 2, 256, 192}}) {
    CAPTURE(c.head_dim);
    for (const int n : {0, 1, 31, 32, 33, 150}) {
      CAPTURE(n);
      numbers random(static_cast<std::uint64_t>(n + c.head_dim));
      const kv_cache cache = make_cache(
          testing::small_shape(c.q_heads, c.kv_heads, c.head_dim, c.value_dim), n, 20, random);
      const auto q = random.normals(c.q_heads * c.head_dim);
      for (const int splits : {1, 3}) {
        run_options options;
        options.splits = splits;
        const simt::scheduled with({static_cast<std::uint64_t>(splits + n)});
        CHECK(worst_error(cache, q, run(cache, q, options)) < 2e-6);
      }
    }
  }
}

TEST_CASE("device attend, tensor cores: every group at head_dim 64 and 128") {
  for (const int dim : {64, 128}) {
    for (const int group : {1, 3, 4, 8, 11}) {
      CAPTURE(dim);
      CAPTURE(group);
      for (const int n : {0, 1, 31, 33, 150}) {
        CAPTURE(n);
        numbers random(static_cast<std::uint64_t>(n + group));
        const kv_cache cache = make_cache(testing::small_shape(2 * group, 2, dim), n, 20, random);
        const auto q = random.normals(2 * group * dim);
        run_options options;
        options.splits = n % 3 + 1;
        const simt::scheduled with({static_cast<std::uint64_t>(n)});
        CHECK(worst_error(cache, q, run(cache, q, options)) < 2e-4);
      }
    }
  }
}

TEST_CASE("device attend, tensor cores: long rows, tail alone and body alone") {
  for (const int window : {1, 70, 2000}) {
    numbers random(5);
    const kv_cache cache = make_cache(testing::small_shape(4, 1, 128), 1000, window, random);
    auto q = random.normals(4 * 128);
    for (float& x : q) x *= 3;
    for (const int splits : {1, 2, 7}) {
      run_options options;
      options.splits = splits;
      CAPTURE(window);
      CAPTURE(splits);
      CHECK(worst_error(cache, q, run(cache, q, options)) < 5e-4);
    }
  }
}

// Value scalars near the smallest and far above one: weights must neither vanish nor overflow.
TEST_CASE("device attend, tensor cores: value scalars of any size") {
  for (const float size : {1e-3F, 1.0F, 3e4F}) {
    numbers random(6);
    const cache_shape shape = testing::small_shape(2, 1, 64);
    kv_cache cache(shape, testing::int8_format(scale_format::token, 4));
    for (std::int32_t p = 0; p < 100; ++p) {
      auto v = random.normals(64);
      for (float& x : v) x *= size / 8;
      testing::append_one(cache, 0, p, random.normals(64), v);
      age(cache, 0, p);
    }
    const auto q = random.normals(2 * 64);
    const device_run got = run(cache, q, {});
    double worst = 0, largest = 0;
    for (int h = 0; h < 2; ++h) {
      const reference_result want = testing::expected(cache, 0, q, h);
      for (int c = 0; c < 64; ++c) {
        const double error = std::fabs(got.o[at(h * 64 + c)] - want.o[at(c)]);
        worst = !(error <= worst) ? error : worst;
        largest = std::max(largest, std::fabs(want.o[at(c)]));
      }
    }
    CAPTURE(size);
    CHECK(worst / largest < 2e-4);
  }
}

TEST_CASE("device attend: learned sinks take mass in both tiers, and alone give their logit") {
  for (const attend_tier tier : {attend_tier::automatic, attend_tier::generic}) {
    for (const int n : {0, 1, 40}) {
      numbers random(7);
      cache_shape shape = testing::small_shape(4, 2, 64);
      shape.sink_logits = {0.5F, -3.0F, 4.0F, 0.0F};
      const kv_cache cache = make_cache(shape, n, 8, random);
      const auto q = random.normals(4 * 64);
      run_options options;
      options.tier = tier;
      options.splits = 2;
      CHECK(worst_error(cache, q, run(cache, q, options)) < 2e-4);
    }
  }
}

// With one entry scalar of one, a score is the exact integer times known factors.
TEST_CASE("device attend: integer scores are the host's to the bit") {
  for (const int dim : {64, 128}) {
    numbers random(8);
    const cache_shape shape = testing::small_shape(8, 1, dim);
    const kv_cache cache = make_cache(shape, 90, 1, random);
    const head_store& store = cache.head(0, 0);
    const auto q = random.normals(8 * dim);
    const device_run got = run(cache, q, {});
    int wrong = 0;
    for (int g = 0; g < 8; ++g) {
      std::vector<float> folded(at(dim));
      for (int c = 0; c < dim; ++c) {
        folded[at(c)] = q[at(g * dim + c)] * static_cast<float>(shape.softmax_scale) *
                        store.k_channel_scale[at(c)];
      }
      digit_row digits;
      split_query(folded.data(), dim, digits);
      for (int t = 0; t < store.body_size(); ++t) {
        const std::int32_t integer = digit_score(digits, store.body_k.data() + t * dim, dim);
        const float want = static_cast<float>(integer) * (digits.scale * device::log2_e) *
                           half_to_float(store.body_k_scale[at(t)]);
        wrong += got.scores[at(g * got.most + t)] == want ? 0 : 1;
      }
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("device attend: mass over the group and the score rules agree with the host's") {
  numbers random(9);
  const cache_shape shape = testing::small_shape(6, 2, 64);
  kv_cache cache = make_cache(shape, 77, 10, random);
  const auto q = random.normals(6 * 64);
  for (int h = 0; h < 2; ++h) {
    for (int e = 0; e < cache.entries(0, h); e += 2) cache.head(0, h).set_score(e, 0.25F);
  }
  struct rule_case {
    mass_layout reduce;
    score_rule rule;
  };
  for (const rule_case c :
       {rule_case{mass_layout::mean, score_rule::ema}, rule_case{mass_layout::max, score_rule::sum},
        rule_case{mass_layout::sum, score_rule::last}}) {
    kv_cache updated = cache;
    const testing::attended host = testing::run_attend(cache, 0, q, c.reduce);
    const score_item item{&updated, 0, host.mass.data(), host.stride, c.rule, 0.75F};
    update_scores({&item, 1});
    run_options options;
    options.reduce = c.reduce;
    options.rule = c.rule;
    options.decay = 0.75F;
    options.splits = 3;
    const device_run got = run(cache, q, options);
    double worst = 0;
    std::size_t next = 0;
    for (int h = 0; h < 2; ++h) {
      for (int e = 0; e < cache.entries(0, h); ++e, ++next) {
        const double mass =
            std::fabs(got.mass[at(h * got.most + e)] - host.mass[at(h * host.stride + e)]);
        const double score = std::fabs(got.new_scores[next] - updated.head(0, h).score(e));
        if (!(mass <= worst)) worst = mass;
        if (!(score <= worst)) worst = score;
      }
    }
    CHECK(worst < 5e-5);
  }
}

// The suite "races" is what also runs under ThreadSanitizer: every kernel, few threads in all.
TEST_CASE("device attend: results do not depend on the schedule" * doctest::test_suite("races")) {
  numbers random(10);
  const kv_cache cache = make_cache(testing::small_shape(4, 2, 64), 150, 30, random);
  const auto q = random.normals(4 * 64);
  for (const attend_tier tier : {attend_tier::automatic, attend_tier::generic}) {
    run_options options;
    options.tier = tier;
    options.splits = 2;
    const device_run first = run(cache, q, options);
    for (std::uint64_t seed = 1; seed < 3; ++seed) {
      const simt::scheduled with({seed});
      const device_run again = run(cache, q, options);
      CHECK(first.o == again.o);
      CHECK(first.lse == again.lse);
    }
  }
}

TEST_CASE("device attend: a query that is not finite shows in its own head alone") {
  numbers random(11);
  const kv_cache cache = make_cache(testing::small_shape(4, 1, 64), 50, 10, random);
  auto q = random.normals(4 * 64);
  const device_run sound = run(cache, q, {});
  q[64 + 3] = NAN;
  const device_run got = run(cache, q, {});
  CHECK(std::isnan(got.lse[1]));
  CHECK(got.lse[0] == sound.lse[0]);
  CHECK(got.o[at(2 * 64 + 5)] == sound.o[at(2 * 64 + 5)]);
}

TEST_CASE("device attend: more heads than a grid can have go in several launches") {
  const std::vector<attend_head> heads(70'000);
  std::vector<float> scores(heads.size() * 2 * 3), outputs(heads.size() * 2 * 2 * 4),
      states(heads.size() * 2 * 2 * 2);
  attend_batch batch;
  batch.heads = heads.data();
  batch.head_count = 70'000;
  batch.group = 2;
  batch.value_dim = 4;
  batch.splits = 2;
  batch.most_entries = 3;
  batch.scores = scores.data();
  batch.partial_o = outputs.data();
  batch.partial_state = states.data();
  const attend_batch first = device::batch_part(batch, 0), rest = device::batch_part(batch, 65'535);
  CHECK(first.head_count == 65'535);
  CHECK(first.scores == batch.scores);
  CHECK(rest.head_count == 70'000 - 65'535);
  CHECK(rest.heads - batch.heads == 65'535);
  CHECK(rest.scores - batch.scores == 65'535 * 2 * 3);
  CHECK(rest.partial_o - batch.partial_o == 65'535 * 2 * 2 * 4);
  CHECK(rest.partial_state - batch.partial_state == 65'535 * 2 * 2 * 2);
}

TEST_CASE("device attend: batches that cannot be are refused by name") {
  attend_batch batch;
  const auto message = [&batch] {
    try {
      launch_attend(batch, attend_tier::automatic, {});
    } catch (const simt::failure& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  CHECK(message().find("pointer") != std::string::npos);
  const attend_head head;
  float x[8] = {};
  batch.heads = &head;
  batch.scores = batch.partial_o = batch.partial_state = x;
  CHECK(message().find("head_count") != std::string::npos);
  batch.head_count = 1;
  CHECK(message().find("head_dim") != std::string::npos);
  batch.head_dim = batch.value_dim = 64;
  batch.reduce = mass_layout::layer_mean;
  CHECK(message().find("layer_mean") != std::string::npos);
  batch.reduce = mass_layout::none;
  batch.rule = score_rule::sum;
  CHECK(message().find("score rule") != std::string::npos);
}

}  // namespace
}  // namespace kvreplay::kernels
