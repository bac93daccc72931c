#include "kernels/quantise.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

using table = std::vector<std::vector<double>>;

rope_pairing pairing_of(const std::string& name) {
  if (name == "half") return rope_pairing::half;
  return name == "interleaved" ? rope_pairing::interleaved : rope_pairing::none;
}

std::vector<float> floats(const std::vector<double>& x) { return {x.begin(), x.end()}; }

// Codes agree except where the quotient lies so near a half that either is right.
void check_codes(const std::vector<std::int8_t>& got, const table& want, const table& rows,
                 const std::vector<double>& channel, const std::vector<double>& token) {
  const std::size_t dim = channel.size();
  REQUIRE(got.size() == want.size() * dim);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const std::size_t r = i / dim, c = i % dim;
    const double quotient = rows[r][c] / (channel[c] * token[r]);
    const bool half = std::fabs(std::fabs(quotient - std::floor(quotient)) - 0.5) < 1e-4;
    const int difference = std::abs(got[i] - static_cast<int>(want[r][c]));
    CHECK(difference <= (half ? 1 : 0));
  }
}

kv_cache golden_cache(const nlohmann::json& c, const table& k, const table& v) {
  const int dim = c.at("head_dim").get<int>();
  cache_shape shape = small_shape(3, 1, dim);
  shape.rope = pairing_of(c.at("rope").get<std::string>());
  kv_cache cache(shape, int8_format(scale_format::hybrid, c.at("window").get<int>()));
  const int prompt = c.at("prompt").get<int>(), step = c.at("step").get<int>();
  for (std::int32_t t = 0; t <= step; ++t) {
    const auto row = static_cast<std::size_t>(t);
    append_one(cache, 0, t, floats(k[row]), floats(v[row]));
    if (t >= prompt - 1 && t < step) age(cache, 0, t);
  }
  return cache;
}

TEST_CASE("the hybrid format agrees with an independent float64 implementation") {
  std::ifstream file(KVREPLAY_SOURCE_DIR "/kernels/testdata/int8.json");
  const nlohmann::json cases = nlohmann::json::parse(file);
  REQUIRE(cases.size() == 3);
  for (const nlohmann::json& c : cases) {
    CAPTURE(c.at("rope").get<std::string>());
    const auto k = c.at("k").get<table>(), v = c.at("v").get<table>();
    const kv_cache cache = golden_cache(c, k, v);
    const head_store& s = cache.head(0, 0);
    const auto key_channel = c.at("key_channel_scale").get<std::vector<double>>();
    const auto value_channel = c.at("value_channel_scale").get<std::vector<double>>();
    const auto key_token = c.at("key_token_scale").get<std::vector<double>>();
    const auto value_token = c.at("value_token_scale").get<std::vector<double>>();
    CHECK(s.body_position == c.at("int8_positions").get<std::vector<std::int32_t>>());
    for (std::size_t i = 0; i < key_channel.size(); ++i) {
      CHECK(near(s.k_channel_scale[i], key_channel[i], 1e-6));
      CHECK(near(s.v_channel_scale[i], value_channel[i], 1e-6));
    }
    REQUIRE(s.body_k_scale.size() == key_token.size());
    for (std::size_t i = 0; i < key_token.size(); ++i) {
      CHECK(near(half_value(s.body_k_scale[i]), key_token[i], 1e-6));
      CHECK(near(half_value(s.body_v_scale[i]), value_token[i], 1e-6));
    }
    check_codes(s.body_k, c.at("key_codes").get<table>(), k, key_channel, key_token);
    check_codes(s.body_v, c.at("value_codes").get<table>(), v, value_channel, value_token);
    CHECK(cache.payload_bytes() == c.at("bytes").get<std::int64_t>());

    std::vector<float> q;
    for (const auto& row : c.at("q").get<table>()) q.insert(q.end(), row.begin(), row.end());
    const attended r = run_attend(cache, 0, q, mass_layout::mean);
    const auto o = c.at("o").get<table>();
    for (std::size_t i = 0; i < r.o.size(); ++i) CHECK(near(r.o[i], o[i / 8][i % 8], 1e-4));
    const auto lse = c.at("lse").get<std::vector<double>>();
    for (std::size_t i = 0; i < lse.size(); ++i) CHECK(near(r.lse[i], lse[i], 1e-4));
    const auto mass = c.at("mass_mean").get<std::vector<double>>();
    REQUIRE(s.size() == static_cast<int>(mass.size()));
    for (int e = 0; e < s.size(); ++e) {
      const auto position = static_cast<std::size_t>(s.position(e));
      CHECK(near(r.mass[static_cast<std::size_t>(e)], mass[position], 1e-4));
    }
  }
}

// The smallest normal float16 whose 127 steps reach the magnitude, by trying all.
double searched_scale(double magnitude) {
  for (half_bits h = 0x0400; h < 0x7c00; ++h) {
    if (127 * half_value(h) >= magnitude) return half_value(h);
  }
  return INFINITY;
}

TEST_CASE("the token scale is the smallest normal float16 that does not clip") {
  numbers random(1);
  for (int i = 0; i < 300; ++i) {
    const auto x = static_cast<float>(std::exp(random.uniform() * 30 - 15));
    CHECK(half_value(token_scale(x)) == searched_scale(static_cast<double>(x)));
  }
  for (const float x : {0.0F, 1e-6F, 127 * 0x1p-14F, 127.0F, 127.00001F, 65504.0F}) {
    CHECK(half_value(token_scale(x)) == searched_scale(static_cast<double>(x)));
  }
}

TEST_CASE("zero, constant, tiny and huge rows") {
  constexpr int dim = 8;
  std::vector<std::vector<float>> rows(6, std::vector<float>(dim, 0.0F));
  rows[1].assign(dim, -0.0F);
  rows[2].assign(dim, 3.7F);
  rows[3][2] = 1e-5F;
  rows[4].assign(dim, 1e-6F);
  rows[5].assign(dim, 65504.0F);
  kv_cache cache(small_shape(1, 1, dim), int8_format(scale_format::token, 0));
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const auto position = static_cast<std::int32_t>(r);
    append_one(cache, 0, position, rows[r], rows[r]);
    std::vector<double> stored;  // what the FP16 tail made of it
    for (const half_bits h : cache.head(0, 0).tail_k) stored.push_back(half_value(h));
    age(cache, 0, position);
    const head_store& s = cache.head(0, 0);
    double magnitude = 0;
    for (const double x : stored) magnitude = std::max(magnitude, std::fabs(x));
    const double scale = searched_scale(magnitude);
    CHECK(half_value(s.body_k_scale[r]) == scale);
    CHECK(half_value(s.body_v_scale[r]) == scale);
    for (std::size_t c = 0; c < dim; ++c) {
      const int code = s.body_k[r * dim + c];
      CHECK(code == std::nearbyint(stored[c] / scale));
      CHECK(std::fabs(code * scale - stored[c]) <= scale / 2);
    }
  }
}

TEST_CASE("a non-finite row is named, not quantised") {
  for (const half_bits bad : {half_bits{0x7c00}, half_bits{0x7e00}}) {
    cache_shape shape = small_shape(2, 2, 4);
    shape.layers = 2;
    kv_cache cache(shape, int8_format(scale_format::hybrid, 2));
    numbers random(1);
    fill(cache, 1, 0, 5, random, false);
    cache.head(1, 1).tail_v[2 * 4 + 1] = bad;
    CHECK_THROWS_WITH_AS(age(cache, 1, 4),
                         doctest::Contains("layer 1, head 1, position 2: v channel 1"),
                         std::domain_error);
  }
  kv_cache cache(small_shape(1, 1, 1), int8_format(scale_format::hybrid, 2));
  std::vector<float> rows(64, 1.0F);
  rows[40] = NAN;
  CHECK_THROWS_WITH_AS(calibrate(cache, 0, rows.data(), rows.data(), 64),
                       doctest::Contains("position 40"), std::domain_error);
}

TEST_CASE("a row beyond the reach of a float16 scalar is an error, not a clipped row") {
  kv_cache cache(small_shape(1, 1, 1), int8_format(scale_format::hybrid, 0));
  const std::vector<float> tiny(64, 1e-4F);
  calibrate(cache, 0, tiny.data(), tiny.data(), 64);
  append_one(cache, 0, 0, {60000.0F}, {1e-4F});
  CHECK_THROWS_WITH_AS(age(cache, 0, 0), doctest::Contains("position 0"), std::domain_error);
}

TEST_CASE("channel scales of the hybrid format: pair norms, guarded") {
  cache_shape shape = small_shape(1, 1, 8);
  shape.rope = rope_pairing::half;
  shape.rope_dim = 4;  // channels 0..3 rotate, 4..7 do not
  kv_cache cache(shape, int8_format(scale_format::hybrid, 4));
  std::vector<float> k(64 * 8, 0.0F), v(64 * 8, 0.0F);
  k[0] = 3;
  k[2] = -4;  // the pair (0, 2): norm 5
  k[8 + 1] = -8;
  k[8 * 5 + 4] = -2;
  k[8 * 63 + 5] = 1e-5F;  // below the guard
  calibrate(cache, 0, k.data(), v.data(), 64);
  const float guard = 8 * 0x1p-12F;
  CHECK(cache.head(0, 0).k_channel_scale == std::vector<float>{5, 8, 5, 8, 2, guard, guard, guard});
  CHECK(cache.head(0, 0).v_channel_scale == std::vector<float>(8, 1.0F));
}

TEST_CASE("a short prompt is calibrated at the first age-out, on all entries held") {
  kv_cache cache(small_shape(1, 1, 1), int8_format(scale_format::hybrid, 3));
  const std::vector<float> few(63, 100.0F);
  calibrate(cache, 0, few.data(), few.data(), 63);
  CHECK(cache.head(0, 0).k_channel_scale.empty());
  const float keys[] = {1, 2, 3, 8, 16};
  for (std::int32_t p = 0; p < 5; ++p) {
    append_one(cache, 0, p, {keys[p]}, {-keys[p]});
    age(cache, 0, p);
    CHECK(cache.head(0, 0).body_size() == std::max(0, p - 2));
  }
  CHECK(cache.head(0, 0).k_channel_scale == std::vector<float>{8.0F});  // 1, 2, 3 and 8 were held
  CHECK(cache.head(0, 0).v_channel_scale == std::vector<float>{8.0F});
  CHECK_THROWS_AS(calibrate(cache, 0, std::vector<float>(64, 1.0F).data(),
                            std::vector<float>(64, 1.0F).data(), 64),
                  std::invalid_argument);
}

TEST_CASE("channel scales that grow requantise what is stored and count it") {
  kv_cache cache(small_shape(1, 1, 2), int8_format(scale_format::channel_grow, 0));
  const std::vector<float> ones(128, 1.0F);
  calibrate(cache, 0, ones.data(), ones.data(), 64);
  append_one(cache, 0, 0, {1, 0.5F}, {1, -1});
  age(cache, 0, 0);
  const head_store& s = cache.head(0, 0);
  CHECK(cache.events().requantised == 0);
  CHECK(s.body_k == std::vector<std::int8_t>{127, 63});  // 63.5 / (a scale rounded up)
  CHECK(s.body_v == std::vector<std::int8_t>{127, -127});
  append_one(cache, 0, 1, {2, 1}, {1, -4});
  age(cache, 0, 1);
  CHECK(cache.events().requantised == 2);  // key channel 0, value channel 1
  CHECK(near(s.k_channel_scale[0], 3.0 / 127, 1e-6));
  CHECK(near(s.k_channel_scale[1], 1.0 / 127, 1e-6));
  CHECK(near(s.v_channel_scale[1], 6.0 / 127, 1e-6));
  CHECK(s.body_k == std::vector<std::int8_t>{42, 63, 85, 127});
  CHECK(s.body_v == std::vector<std::int8_t>{127, -21, 127, -85});
  CHECK(cache.events().clipped == 0);
  CHECK(s.body_k_scale.empty());
}

TEST_CASE("frozen channel scales clip and count") {
  kv_cache cache(small_shape(1, 1, 1), int8_format(scale_format::channel_static, 0));
  const std::vector<float> ones(64, 1.0F);
  calibrate(cache, 0, ones.data(), ones.data(), 64);
  for (std::int32_t p = 0; p < 4; ++p) {
    append_one(cache, 0, p, {static_cast<float>(p)}, {p == 3 ? -1.25F : 0.5F});
    age(cache, 0, p);
  }
  const head_store& s = cache.head(0, 0);
  CHECK(near(s.k_channel_scale[0], 1.25 / 127, 1e-6));
  CHECK(s.body_k == std::vector<std::int8_t>{0, 102, 127, 127});
  CHECK(s.body_v == std::vector<std::int8_t>{51, 51, 51, -127});
  CHECK(cache.events().clipped == 2);
  CHECK(cache.events().requantised == 0);
  CHECK(cache.events().quantised == 4);
}

TEST_CASE("precision is a matter of age alone") {
  constexpr int d = 8, total = 200, window = 32;
  const auto k = numbers(1).normals(total * d), v = numbers(2).normals(total * d);
  const auto run = [&](scale_format scales, const std::vector<int>& ageing_steps) {
    kv_cache cache(small_shape(1, 1, d), int8_format(scales, window));
    calibrate(cache, 0, k.data(), v.data(), 100);
    for (std::int32_t p = 0; p < total; ++p) {
      const append_item item{&cache, 0, p, k.data() + p * d, v.data() + p * d};
      append({&item, 1});
      if (ageing_steps.empty() || std::count(ageing_steps.begin(), ageing_steps.end(), p) > 0) {
        age(cache, 0, p);
      }
    }
    return cache;
  };
  for (const auto scales : {scale_format::hybrid, scale_format::token}) {
    const kv_cache each = run(scales, {});
    const std::int64_t tables = scales == scale_format::hybrid ? 2 * d * 4 : 0;
    CHECK(each.payload_bytes() == 168 * (2 * d + 4) + 32 * 4 * d + tables);
    for (const std::vector<int>& steps : {std::vector<int>{199}, std::vector<int>{99, 199}}) {
      const kv_cache other = run(scales, steps);
      CHECK(other.head(0, 0).body_size() == 168);
      CHECK(other.head(0, 0).body_position == each.head(0, 0).body_position);
      CHECK(other.head(0, 0).body_k == each.head(0, 0).body_k);
      CHECK(other.head(0, 0).body_v_scale == each.head(0, 0).body_v_scale);
      CHECK(other.payload_bytes() == each.payload_bytes());
      CHECK(other.events().quantised == 168);
    }
    const stored_entries e = read_entries(each, 0, 0);
    double error = 0;
    for (std::size_t i = 0; i < 168 * d; ++i) {
      error = std::max(error, std::fabs(e.k[i] - static_cast<double>(k[i])));
    }
    CHECK(error > 0);
    CHECK(error < 0.06);
  }
}

TEST_CASE("first positions may stay in high precision") {
  storage_format format = int8_format(scale_format::token, 5);
  format.tail_sinks = 3;
  kv_cache cache(small_shape(1, 1, 4), format);
  numbers random(1);
  fill(cache, 0, 0, 20, random);
  std::vector<std::int32_t> tail = cache.head(0, 0).tail_position;
  std::sort(tail.begin(), tail.end());
  CHECK(tail == std::vector<std::int32_t>{0, 1, 2, 15, 16, 17, 18, 19});
}

}  // namespace
}  // namespace kvreplay::kernels
