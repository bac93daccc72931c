// Every path that this machine has, against the double reference and against the others.
#include "kernels/isa.hpp"

#include <doctest/doctest.h>

#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "kernels/inner_loops.hpp"
#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

std::vector<isa> find_paths() {
  std::vector<isa> found;
  for (const isa set : {isa::plain, isa::avx2, isa::avx512}) {
    if (isa_supported(set)) {
      found.push_back(set);
    } else {
      MESSAGE("skipped: this machine has no " << isa_name(set));
    }
  }
  return found;
}

const std::vector<isa>& paths() {
  static const std::vector<isa> found = find_paths();
  return found;
}

std::vector<storage_format> all_formats(int window) {
  storage_format full;
  full.tail = tail_format::fp32;
  std::vector<storage_format> formats = {storage_format{}, full};
  for (const auto scales : {scale_format::hybrid, scale_format::token, scale_format::channel_grow,
                            scale_format::channel_static, scale_format::group}) {
    formats.push_back(int8_format(scales, window));
  }
  formats.push_back(int4_format(window));
  return formats;
}

// Everything, where the environment asks for it; else a scattered seventh of the combinations,
// which meets every value of every parameter.
bool all_shapes() { return std::getenv("KVREPLAY_ALL_SHAPES") != nullptr; }

std::uint64_t mix_of(std::uint64_t seed) { return seed * 0x9e3779b97f4a7c15u >> 40; }

void check_mass(const attended& r, const cache_shape& shape, int entries) {
  for (int h = 0; h < shape.q_heads; ++h) {
    double sum = entries == 0 && shape.sink_logits.empty() ? 1 : 0;
    for (int e = 0; e < entries; ++e) {
      sum += static_cast<double>(r.mass[static_cast<std::size_t>(h * r.stride + e)]);
    }
    if (!shape.sink_logits.empty()) {
      const auto at = static_cast<std::size_t>(h);
      sum += std::exp(static_cast<double>(shape.sink_logits[at]) - static_cast<double>(r.lse[at]));
    }
    CHECK(near(sum, 1, 1e-5));
  }
}

void check_shape(int group, int dim, int length, int variant, std::uint64_t seed) {
  const int kv_heads = length == 1000 ? 1 : 2;
  cache_shape shape = small_shape(group * kv_heads, kv_heads, dim);
  numbers random(seed);
  const bool window = (variant & 1) != 0, sinks = (variant & 2) != 0;
  if (window) shape.window = {25};
  if (sinks) shape.sink_logits = random.normals(shape.q_heads);
  const std::vector<storage_format> formats = all_formats(variant % 2 == 0 ? 16 : 0);
  for (std::size_t f = 0; f < formats.size(); ++f) {
    if (!all_shapes() && (f + seed) % formats.size() >= 2) continue;
    kv_cache cache(shape, formats[f]);
    fill(cache, 0, 0, length, random, window);
    age(cache, 0, length - 1);
    const std::vector<float> q = random.normals(std::int64_t{shape.q_heads} * dim);
    for (const isa set : paths()) {
      const forced_isa forced(set);
      CAPTURE(isa_name(set));
      CAPTURE(f);
      CHECK(worst_error(cache, 0, q) <= attend_tolerance(cache, 0, q));
      check_mass(run_attend(cache, 0, q, mass_layout::per_query_head), shape, cache.entries(0, 0));
    }
  }
}

TEST_CASE("every path agrees with the reference for any shape") {
  std::uint64_t seed = 0;
  for (const int group : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
    for (const int dim : {8, 64, 80, 96, 128, 256}) {
      for (const int length : {0, 1, 31, 32, 33, 1000}) {
        for (int variant = 0; variant < 4; ++variant, ++seed) {
          const bool large = length == 1000 && (group > 4 || dim > 128);
          if (!all_shapes() && (mix_of(seed) % 7 != 0 || (large && mix_of(seed) % 3 != 0)))
            continue;
          CAPTURE(group);
          CAPTURE(dim);
          CAPTURE(length);
          CAPTURE(variant);
          check_shape(group, dim, length, variant, seed);
        }
      }
    }
  }
}

TEST_CASE("every path takes widths that fill no register") {
  for (const auto& [head_dim, value_dim] :
       {std::pair{1, 3}, {7, 17}, {20, 48}, {65, 100}, {129, 1}, {255, 63}}) {
    const cache_shape shape = small_shape(10, 2, head_dim, value_dim);
    numbers random(static_cast<std::uint64_t>(head_dim));
    for (const storage_format& format : all_formats(8)) {
      kv_cache cache(shape, format);
      fill(cache, 0, 0, 45, random);
      const std::vector<float> q = random.normals(std::int64_t{shape.q_heads} * head_dim);
      for (const isa set : paths()) {
        const forced_isa forced(set);
        CAPTURE(isa_name(set));
        CAPTURE(head_dim);
        CHECK(worst_error(cache, 0, q) <= attend_tolerance(cache, 0, q));
      }
    }
  }
}

TEST_CASE("a path's bits do not depend on what else is in the batch") {
  numbers random(8);
  kv_cache cache(small_shape(6, 2, 80), int8_format(scale_format::hybrid, 20));
  fill(cache, 0, 0, 77, random);
  const std::vector<float> q = random.normals(6 * 80);
  for (const isa set : paths()) {
    const forced_isa forced(set);
    const attended alone = run_attend(cache, 0, q, mass_layout::mean);
    std::vector<attended> out(5, alone);
    std::vector<attend_item> items;
    for (attended& r : out) {
      std::fill(r.o.begin(), r.o.end(), NAN);
      items.push_back({&cache, 0, q.data(), r.o.data(), r.lse.data(), r.mass.data(), r.stride,
                       mass_layout::mean});
    }
    attend(items);
    for (const attended& r : out) {
      CHECK(r.o == alone.o);
      CHECK(r.lse == alone.lse);
    }
  }
}

// K . q in 64 bits from the digits alone.
std::int64_t plain_sum(const digit_row& q, const std::int8_t* k, int dim) {
  std::int64_t sum = 0;
  for (int c = 0; c < dim; ++c) sum += (128 * std::int64_t{q.hi[c]} + q.lo[c]) * k[c];
  return sum;
}

void check_digit_scores(const std::vector<float>& q, const std::vector<std::int8_t>& codes) {
  const int dim = static_cast<int>(q.size());
  const auto rows = static_cast<std::int64_t>(codes.size()) / dim;
  digit_row digits;
  split_query(q.data(), dim, digits);
  for (const isa set : paths()) {
    const forced_isa forced(set);
    CAPTURE(isa_name(set));
    CAPTURE(dim);
    std::vector<std::int32_t> got(static_cast<std::size_t>(rows), -1);
    active_loops().digit_scores(digits, dim, codes.data(), rows, got.data());
    for (std::int64_t i = 0; i < rows; ++i) {
      CHECK(got[static_cast<std::size_t>(i)] == plain_sum(digits, codes.data() + i * dim, dim));
    }
  }
}

TEST_CASE("integer scores are exact on every path, at the ends of the range too") {
  numbers random(12);
  for (const int dim : {1, 8, 31, 63, 64, 65, 80, 96, 128, 200, 256}) {
    for (const int rows : {1, 15, 16, 17, 40}) {
      std::vector<std::int8_t> codes;
      for (int i = 0; i < rows * dim; ++i) {
        codes.push_back(static_cast<std::int8_t>(random.below(255) - 127));
      }
      check_digit_scores(random.normals(dim), codes);
    }
    const auto n = static_cast<std::size_t>(dim);
    for (const float q : {3.0F, -3.0F}) {
      for (const int code : {-128, -127, 127}) {
        check_digit_scores(std::vector<float>(n, q),
                           std::vector<std::int8_t>(n * 3, static_cast<std::int8_t>(code)));
      }
    }
  }
}

TEST_CASE("digits of a query are within half a step, and in their ranges") {
  numbers random(3);
  for (const float size : {1e-30F, 1e-3F, 1.0F, 1e30F}) {
    std::vector<float> q = random.normals(256);
    for (float& x : q) x *= size;
    digit_row digits;
    split_query(q.data(), 256, digits);
    std::int64_t sum = 0;
    for (int c = 0; c < 256; ++c) {
      const int value = 128 * digits.hi[c] + digits.lo[c];
      sum += value;
      CHECK(digits.lo[c] >= -64);
      CHECK(digits.lo[c] <= 63);
      CHECK(std::abs(value) <= 16256);
      const double step = digits.scale;
      CHECK(std::fabs(value * step - static_cast<double>(q[static_cast<std::size_t>(c)])) <=
            0.5001 * step);
    }
    CHECK(digits.sum == sum);
  }
  digit_row digits;
  const float tiny[] = {1e-38F, 0.0F};
  split_query(tiny, 2, digits);
  CHECK(digits.scale == 0.0F);
  CHECK(digits.hi[0] == 0);
  const float broken[] = {1.0F, INFINITY};
  split_query(broken, 2, digits);
  CHECK(std::isnan(digits.scale));
}

TEST_CASE("integer scores of a head are its scores, and the same on every path") {
  numbers random(21);
  for (const auto scales : {scale_format::hybrid, scale_format::token, scale_format::channel_grow,
                            scale_format::channel_static}) {
    const cache_shape shape = small_shape(6, 2, 96);
    kv_cache cache(shape, int8_format(scales, 0));
    fill(cache, 0, 0, 50, random);
    const std::vector<float> q = random.normals(96);
    const stored_entries entries = read_entries(cache, 0, 1);
    const head_store& store = cache.head(0, 1);
    std::vector<std::int32_t> first;
    for (const isa set : paths()) {
      const forced_isa forced(set);
      const head_integers got = integer_scores(cache, 0, 4, q);
      REQUIRE(got.scores.size() == 50);
      if (first.empty()) first = got.scores;
      CHECK(got.scores == first);
      for (std::size_t i = 0; i < 50; ++i) {
        double want = 0;
        for (std::size_t c = 0; c < 96; ++c) {
          want += static_cast<double>(q[c]) * entries.k[i * 96 + c];
        }
        const double scalar = store.body_k_scale.empty() ? 1 : half_value(store.body_k_scale[i]);
        const double step = static_cast<double>(got.scale) * scalar;
        double codes = 0;
        for (std::size_t c = 0; c < 96; ++c) codes += std::abs(int{store.body_k[i * 96 + c]});
        // Every channel of the query is within half a step.
        CHECK(std::fabs(step * got.scores[i] - want * shape.softmax_scale) <= 0.501 * step * codes);
      }
    }
  }
  kv_cache cache(small_shape(2, 1, 8), {});
  CHECK_THROWS_AS(integer_scores(cache, 0, 0, std::vector<float>(7)), std::invalid_argument);
  CHECK_THROWS_AS(integer_scores(cache, 0, 2, std::vector<float>(8)), std::out_of_range);
}

TEST_CASE("FP16 conversions are those of the plain path for every pattern") {
  std::vector<half_bits> patterns(65536);
  for (std::size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<half_bits>(i);
  std::vector<float> wide(65536), between(65535);
  for (const isa set : paths()) {
    const forced_isa forced(set);
    const inner_loops& loops = active_loops();
    loops.from_halves(patterns.data(), 65536, wide.data());
    std::vector<half_bits> back(65535);
    loops.to_halves(wide.data(), 65535, back.data());
    for (std::size_t i = 0; i < 65535; ++i) {
      const double want = half_value(patterns[i]);
      if (is_finite_half(patterns[i])) {
        REQUIRE(static_cast<double>(wide[i]) == want);
        REQUIRE(back[i] == patterns[i]);
        between[i] = wide[i] + (wide[i + 1] - wide[i]) / 2;  // ties
      } else {
        REQUIRE(std::isfinite(wide[i]) == false);
        between[i] = 65520.0F;
      }
    }
    loops.to_halves(between.data(), 65535, back.data());
    for (std::size_t i = 0; i < 65535; ++i) {
      if (std::isfinite(between[i])) REQUIRE(back[i] == float_to_half(between[i]));
    }
  }
}

TEST_CASE("exponentials and softmax agree with double on every path") {
  std::vector<float> x;
  for (int i = -9000; i <= 500; ++i) x.push_back(static_cast<float>(i) * 0.01F);
  for (const isa set : paths()) {
    const forced_isa forced(set);
    std::vector<float> e = x;
    active_loops().exponentials(e.data(), static_cast<std::int64_t>(e.size()), 0.5F);
    for (std::size_t i = 0; i < x.size(); ++i) {
      const float shifted = x[i] - 0.5F;
      const double want = shifted < -87 ? 0 : std::exp(static_cast<double>(shifted));
      REQUIRE(std::fabs(static_cast<double>(e[i]) - want) <= 3e-7 * want);
    }
    std::vector<float> row = {-INFINITY, 1.0F, NAN};
    active_loops().exponentials(row.data(), 3, 1.0F);
    CHECK(row[0] == 0.0F);
    CHECK(row[1] == 1.0F);
    CHECK(std::isnan(row[2]));
    CHECK(active_loops().softmax(row.data(), 0, nullptr) == -INFINITY);
  }
}

TEST_CASE("KVREPLAY_ISA is refused in one line") {
  CHECK(parse_isa("plain") == isa::plain);
  CHECK_THROWS_WITH_AS(parse_isa("sse9"), "KVREPLAY_ISA is 'sse9', expected plain, avx2 or avx512",
                       std::invalid_argument);
  for (const isa set : {isa::avx2, isa::avx512}) {
    if (isa_supported(set)) continue;
    CHECK_THROWS_WITH_AS(parse_isa(isa_name(set)), doctest::Contains("this machine has no"),
                         std::invalid_argument);
    CHECK_THROWS_AS(forced_isa{set}, std::invalid_argument);
  }
}

}  // namespace
}  // namespace kvreplay::kernels
