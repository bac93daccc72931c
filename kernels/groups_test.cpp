#include "kernels/groups.hpp"

#include <doctest/doctest.h>

#include <functional>
#include <map>
#include <stdexcept>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

using matrix = std::vector<std::vector<double>>;

// Among all finite FP16 values: the smallest normal positive one for which `reaches`, or the
// largest that is not above x.
double least_scale(const std::function<bool(double)>& reaches) {
  for (half_bits h = 0x0400; h < 0x7c00; ++h) {
    if (reaches(half_value(h))) return half_value(h);
  }
  return INFINITY;
}
double half_below(double x) {
  double best = -INFINITY;
  for (int h = 0; h < 0x10000; ++h) {
    const double y = half_value(static_cast<half_bits>(h));
    if ((h & 0x7c00) != 0x7c00 && y <= x && y > best) best = y;
  }
  return best;
}

double rounded_to_half(double x) { return half_value(float_to_half(static_cast<float>(x))); }

// What the format makes of a group's rows [size][dim], kept as FP16 before.
matrix reference_group(const storage_format& format, bool keys, const matrix& rows) {
  matrix out = rows;
  const bool by_row = format.body == body_format::int4 && !keys;
  std::map<std::vector<double>, std::vector<double>> known;  // searching all FP16 values takes time
  const auto column = [&](std::size_t r, std::size_t c) {
    std::vector<double> members;
    if (by_row) {
      const std::size_t begin = c / 32 * 32, end = std::min(rows[r].size(), begin + 32);
      members.assign(rows[r].begin() + static_cast<std::ptrdiff_t>(begin),
                     rows[r].begin() + static_cast<std::ptrdiff_t>(end));
    } else {
      for (const auto& row : rows) members.push_back(row[c]);
    }
    return members;
  };
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t c = 0; c < rows[r].size(); ++c) {
      const auto members = column(r, c);
      auto& grid = known[members];
      const auto [least, most] = std::minmax_element(members.begin(), members.end());
      if (grid.empty() && format.body == body_format::int4) {
        const double zero = half_below(*least);
        grid = {zero, least_scale([&](double s) { return 15 * s >= *most - zero; })};
      } else if (grid.empty()) {
        const double absmax = std::max(std::fabs(*least), std::fabs(*most));
        grid = {0, least_scale([&](double s) { return 127 * s >= absmax; })};
      }
      out[r][c] = grid[0] + std::nearbyint((rows[r][c] - grid[0]) / grid[1]) * grid[1];
    }
  }
  return out;
}

struct filled {
  kv_cache cache;
  matrix k, v;  // FP16 values of positions 0, 1, ...
};

// n positions of one KV head through append and age; `rows` gives the values.
filled fill_rows(const cache_shape& shape, const storage_format& format, int n,
                 const std::function<float(int position, int c, bool key)>& rows) {
  filled f{kv_cache(shape, format), {}, {}};
  for (int p = 0; p < n; ++p) {
    std::vector<float> k, v;
    for (int c = 0; c < shape.head_dim; ++c) k.push_back(rows(p, c, true));
    for (int c = 0; c < shape.value_dim; ++c) v.push_back(rows(p, c, false));
    append_one(f.cache, 0, p, k, v);
    age(f.cache, 0, p);
    f.k.emplace_back(k.begin(), k.end());
    f.v.emplace_back(v.begin(), v.end());
    for (double& x : f.k.back()) x = rounded_to_half(x);
    for (double& x : f.v.back()) x = rounded_to_half(x);
  }
  return f;
}

// The stored entries against the reference; where a quotient lies on a half, either neighbour.
void check_against_reference(const filled& f, int aged) {
  const auto size = static_cast<std::size_t>(group_size(f.cache.format()));
  const head_store& s = f.cache.head(0, 0);
  const std::size_t body = static_cast<std::size_t>(aged) / size * size;
  REQUIRE(static_cast<std::size_t>(s.body_size()) == body);
  const stored_entries e = read_entries(f.cache, 0, 0);
  for (const bool keys : {true, false}) {
    const matrix& given = keys ? f.k : f.v;
    const std::size_t dim = given[0].size();
    for (std::size_t first = 0; first < body; first += size) {
      const auto begin = given.begin() + static_cast<std::ptrdiff_t>(first);
      const matrix rows(begin, begin + static_cast<std::ptrdiff_t>(size));
      const matrix want = reference_group(f.cache.format(), keys, rows);
      for (std::size_t r = 0; r < size; ++r) {
        REQUIRE(s.body_position[first + r] == static_cast<std::int32_t>(first + r));
        for (std::size_t c = 0; c < dim; ++c) {
          const double got = (keys ? e.k : e.v)[(first + r) * dim + c];
          const double x = rows[r][c];
          const bool tie = near(std::fabs(got - x), std::fabs(want[r][c] - x), 1e-6);
          CHECK((near(got, want[r][c], 1e-9) || tie));
        }
      }
    }
    for (std::size_t p = body; p < given.size(); ++p) {  // what waits is FP16
      for (std::size_t c = 0; c < dim; ++c) {
        CHECK((keys ? e.k : e.v)[p * dim + c] == given[p][c]);
      }
    }
  }
}

TEST_CASE("groups are stored as an independent implementation in double stores them") {
  for (const bool int4 : {false, true}) {
    for (const auto& [head_dim, value_dim] : {std::pair{8, 8}, {20, 33}, {65, 7}, {1, 64}}) {
      const storage_format format = int4 ? int4_format(9) : int8_format(scale_format::group, 9);
      CAPTURE(int4);
      CAPTURE(head_dim);
      numbers random(static_cast<std::uint64_t>(head_dim));
      const filled f =
          fill_rows(small_shape(1, 1, head_dim, value_dim), format, 150, [&](int, int c, bool) {
            return random.normal() * static_cast<float>(1 + c % 5) + static_cast<float>(c % 3);
          });
      check_against_reference(f, 150 - 9);
    }
  }
}

TEST_CASE("zero, constant, tiny and huge channels and rows") {
  const float kinds[] = {0.0F, -0.0F, 3.7F, 1e-6F, 65504.0F, -65504.0F, 1e-5F};
  for (const bool int4 : {false, true}) {
    const storage_format format = int4 ? int4_format(0) : int8_format(scale_format::group, 0);
    CAPTURE(int4);
    // A kind per channel (groups over entries), then per row (groups over channels).
    for (const bool by_channel : {true, false}) {
      const filled f = fill_rows(small_shape(1, 1, 7), format, 64, [&](int p, int c, bool) {
        return kinds[static_cast<std::size_t>(by_channel ? c : p % 7)];
      });
      check_against_reference(f, 64);
      const stored_entries e = read_entries(f.cache, 0, 0);
      for (std::size_t i = 0; i < e.k.size(); ++i) {
        if (!by_channel) break;
        CHECK(std::fabs(e.k[i] - f.k[i / 7][i % 7]) <=
              std::max(0x1p-15, std::fabs(f.k[i / 7][i % 7]) / 254));
        if (i % 7 < 2) CHECK(e.k[i] == 0);
        if (int4) CHECK(e.k[i] == f.k[i / 7][i % 7]);  // a constant channel is its zero point
      }
    }
    // One large value among zeros.
    const filled f = fill_rows(small_shape(1, 1, 40), format, 64, [](int p, int c, bool) {
      return p == 5 && c == 33 ? 1000.0F : 0.0F;
    });
    check_against_reference(f, 64);
  }
}

TEST_CASE("values beyond float16 scales are refused by name") {
  for (const bool int4 : {false, true}) {
    storage_format format = int4 ? int4_format(0) : int8_format(scale_format::group, 0);
    format.tail = tail_format::fp32;
    cache_shape shape = small_shape(2, 2, 4);
    kv_cache cache(shape, format);
    const std::vector<float> ones(8, 1.0F), huge(8, -3e7F);
    for (std::int32_t p = 0; p < 63; ++p) {
      append_one(cache, 0, p, ones, p == 40 ? huge : ones);
      if (!int4 || p < 32) age(cache, 0, p);
    }
    append_one(cache, 0, 63, ones, ones);
    CHECK_THROWS_WITH_AS(
        age(cache, 0, 63),
        doctest::Contains(int4 ? "layer 0, head 0, position 32: a row of the group"
                               : "layer 0, head 0, position 0: a row of the group"),
        std::domain_error);
  }
}

// Keeps the entries whose position `stays` accepts.
void keep_only(kv_cache& cache, const std::function<bool(std::int32_t)>& stays) {
  const head_store& s = cache.head(0, 0);
  std::vector<std::uint8_t> keep;
  for (int e = 0; e < s.size(); ++e) keep.push_back(stays(s.position(e)) ? 1 : 0);
  compact(cache, 0, 0, keep);
}

std::map<std::int32_t, std::vector<double>> by_position(const kv_cache& cache) {
  const stored_entries e = read_entries(cache, 0, 0);
  std::map<std::int32_t, std::vector<double>> out;
  for (int i = 0; i < cache.entries(0, 0); ++i) {
    auto& row = out[cache.head(0, 0).position(i)];
    const auto row_of_entry = [i](const std::vector<double>& x, int dim) {
      return std::vector<double>(x.begin() + std::int64_t{i} * dim,
                                 x.begin() + std::int64_t{i + 1} * dim);
    };
    row = row_of_entry(e.k, cache.shape().head_dim);
    for (const double x : row_of_entry(e.v, cache.shape().value_dim)) row.push_back(x);
  }
  return out;
}

TEST_CASE("a group that loses members keeps its scales until the last has left") {
  constexpr int k_dim = 40, v_dim = 70, d = k_dim + v_dim;
  for (const bool int4 : {false, true}) {
    for (const int page : {0, 16}) {
      storage_format format = int4 ? int4_format(10) : int8_format(scale_format::group, 10);
      format.page = page;
      CAPTURE(int4);
      kv_cache cache(small_shape(3, 1, k_dim, v_dim), format);
      numbers random(4);
      fill(cache, 0, 0, 10 + 3 * 64 + 5, random);
      const std::int64_t groups = int4 ? 6 : 3;
      const std::int64_t row = int4 ? 20 + 35 + 3 * 4 : d;  // 70 channels: 3 groups of values
      const std::int64_t table = int4 ? 4 * k_dim : 2 * d;
      const auto bytes = [&](std::int64_t tail, std::int64_t body, std::int64_t live) {
        return tail * 2 * d + body * row + live * table;
      };
      CHECK(cache.payload_bytes() == bytes(15, 192, groups));
      CHECK(cache.state_bytes(0) == (15 + 192) * 8 + 192 * 4);
      const auto before = by_position(cache);

      keep_only(cache, [](std::int32_t p) { return p % 3 != 1; });  // many leave: gathered
      CHECK(cache.head(0, 0).groups == groups);
      for (const auto& [p, values] : by_position(cache)) CHECK(before.at(p) == values);

      keep_only(cache, [](std::int32_t p) { return p != 6 && p != 9; });  // few: holes are filled
      for (const auto& [p, values] : by_position(cache)) CHECK(before.at(p) == values);

      // The second group of 64 leaves but for one, then whole.
      keep_only(cache, [](std::int32_t p) { return p < 64 || p >= 128 || p == 66; });
      CHECK(cache.head(0, 0).groups == (int4 ? 5 : 3));
      keep_only(cache, [](std::int32_t p) { return p != 66; });
      CHECK(cache.head(0, 0).groups == (int4 ? 4 : 2));
      for (const auto& [p, values] : by_position(cache)) CHECK(before.at(p) == values);
      const head_store& s = cache.head(0, 0);
      CHECK(cache.payload_bytes() == bytes(s.tail_size(), s.body_size(), int4 ? 4 : 2));
      const std::vector<float> q = random.normals(3 * k_dim);
      CHECK(worst_error(cache, 0, q) <= 1e-5);

      keep_only(cache, [](std::int32_t p) { return p >= 192; });
      CHECK(cache.head(0, 0).groups == 0);
      CHECK(cache.payload_bytes() == bytes(10, 0, 0));
      fill(cache, 0, 207, 70, random);  // 70 have aged since
      CHECK(cache.head(0, 0).groups == (int4 ? 2 : 1));
      CHECK(worst_error(cache, 0, q) <= 1e-5);
    }
  }
}

TEST_CASE("who leaves before the group is full is replaced by the next to age") {
  for (const bool int4 : {false, true}) {
    kv_cache cache(small_shape(1, 1, 8),
                   int4 ? int4_format(4) : int8_format(scale_format::group, 4));
    numbers random(6);
    const int size = int4 ? 32 : 64;
    fill(cache, 0, 0, 4 + size - 1, random);
    CHECK(cache.head(0, 0).body_size() == 0);
    keep_only(cache, [](std::int32_t p) { return p != 3; });
    fill(cache, 0, 4 + size - 1, 1, random);
    CHECK(cache.head(0, 0).body_size() == 0);
    fill(cache, 0, 4 + size, 1, random);
    REQUIRE(cache.head(0, 0).body_size() == size);
    std::vector<std::int32_t> members;
    for (std::int32_t p = 0; p <= size; ++p) {
      if (p != 3) members.push_back(p);
    }
    CHECK(cache.head(0, 0).body_position == members);
  }
}

TEST_CASE("one call over many steps makes the groups that step by step ageing makes") {
  for (const bool int4 : {false, true}) {
    const storage_format format = int4 ? int4_format(7) : int8_format(scale_format::group, 7);
    kv_cache each(small_shape(2, 1, 24), format), once(small_shape(2, 1, 24), format);
    numbers a(9), b(9);
    fill(each, 0, 0, 205, a);
    fill(once, 0, 0, 205, b, false);
    age(once, 0, 204);
    CHECK(by_position(each) == by_position(once));
    CHECK(each.payload_bytes() == once.payload_bytes());
    CHECK(each.events().quantised == once.events().quantised);
    const head_store& s = each.head(0, 0);
    CHECK(s.body_size() == 192);
    CHECK(s.body_group == once.head(0, 0).body_group);
  }
}

TEST_CASE("integer scores are refused where scales are no part of the query") {
  kv_cache cache(small_shape(1, 1, 8), int4_format(4));
  CHECK_THROWS_AS(integer_scores(cache, 0, 0, std::vector<float>(8, 1.0F)), std::invalid_argument);
}

}  // namespace
}  // namespace kvreplay::kernels
