// What the kernel tests share: repeatable numbers, caches filled with them, and stored entries read
// back in double by formulas that use none of the code under test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/append.hpp"
#include "kernels/attend.hpp"
#include "kernels/groups.hpp"
#include "kernels/isa.hpp"
#include "kernels/kv_cache.hpp"
#include "kernels/quantise.hpp"
#include "kernels/reference.hpp"
#include "kernels/select.hpp"

namespace kvreplay::kernels::testing {

// Repeatable numbers: a linear congruential generator (Knuth's MMIX constants), high bits used.
class numbers {
 public:
  explicit numbers(std::uint64_t seed) : state_(seed * 2 + 1) {}
  double uniform() {  // [0, 1)
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state_ >> 11) * 0x1p-53;
  }
  float normal() {  // close enough: the sum of twelve uniforms
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += uniform();
    return static_cast<float>(sum);
  }
  int below(int n) { return static_cast<int>(uniform() * n); }
  std::vector<float> normals(std::int64_t n) {
    std::vector<float> x(static_cast<std::size_t>(n));
    for (float& v : x) v = normal();
    return x;
  }

 private:
  std::uint64_t state_;
};

inline double half_value(half_bits h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

inline cache_shape small_shape(int q_heads, int kv_heads, int head_dim, int value_dim = 0) {
  cache_shape shape;
  shape.layers = 1;
  shape.q_heads = q_heads;
  shape.kv_heads = kv_heads;
  shape.head_dim = head_dim;
  shape.value_dim = value_dim == 0 ? head_dim : value_dim;
  shape.softmax_scale = 1 / std::sqrt(static_cast<double>(head_dim));
  return shape;
}

inline storage_format int8_format(scale_format scales, int window) {
  storage_format format;
  format.body = body_format::int8;
  format.scales = scales;
  format.tail_window = window;
  return format;
}

inline storage_format int4_format(int window) {
  storage_format format = int8_format(scale_format::group, window);
  format.body = body_format::int4;
  return format;
}

inline void append_one(kv_cache& cache, int layer, std::int32_t position,
                       const std::vector<float>& k, const std::vector<float>& v) {
  const append_item item{&cache, layer, position, k.data(), v.data()};
  append({&item, 1});
}

// Appends positions first .. first + count - 1 with random rows, ageing after each when asked.
inline void fill(kv_cache& cache, int layer, std::int32_t first, int count, numbers& random,
                 bool ageing = true) {
  const cache_shape& s = cache.shape();
  for (std::int32_t p = first; p < first + count; ++p) {
    append_one(cache, layer, p, random.normals(s.kv_heads * s.head_dim),
               random.normals(s.kv_heads * s.value_dim));
    if (ageing) age(cache, layer, p);
  }
}

struct attended {
  std::vector<float> o, lse, mass;
  std::int64_t stride = 0;
};

inline attended run_attend(const kv_cache& cache, int layer, const std::vector<float>& q,
                           mass_layout layout) {
  const cache_shape& s = cache.shape();
  attended r;
  r.stride = cache.max_entries(layer) + 3;
  r.o.assign(static_cast<std::size_t>(s.q_heads * s.value_dim), NAN);
  r.lse.assign(static_cast<std::size_t>(s.q_heads), NAN);
  r.mass.assign(static_cast<std::size_t>(s.q_heads * r.stride), NAN);
  const attend_item item{&cache,       layer,         q.data(), r.o.data(),
                         r.lse.data(), r.mass.data(), r.stride, layout};
  attend({&item, 1});
  return r;
}

// The entries of a head as numbers, in entry order: k [n, head_dim], v [n, value_dim].
struct stored_entries {
  std::vector<double> k, v;
};

inline stored_entries read_entries(const kv_cache& cache, int layer, int head) {
  const head_store& s = cache.head(layer, head);
  const payload_rows& rows = cache.payload(layer, head);
  const cache_shape& shape = cache.shape();
  const row_pages body = cache.rows_of(layer, head, tier::body);
  const row_pages tail = cache.rows_of(layer, head, tier::tail);
  const auto at = [](const row_pages& pages, int slot, int dim, int c) {
    return static_cast<std::size_t>(row_of(pages, slot) * dim + c);
  };
  const bool int4 = cache.format().body == body_format::int4;
  // Entry `slot`, channel c of a format with groups: KIVI's, or INT8 by group and channel.
  const auto grouped = [&](bool keys, int slot, int c) {
    const int dim = keys ? shape.head_dim : shape.value_dim;
    const auto cell =
        static_cast<std::size_t>(s.body_group[static_cast<std::size_t>(slot)] * dim + c);
    const std::vector<std::int8_t>& codes = keys ? rows.body_k : rows.body_v;
    if (!int4) {
      const auto& scale = keys ? s.group_k_scale : s.group_v_scale;
      return codes[at(body, slot, dim, c)] * half_value(scale[cell]);
    }
    const int block_begin = c / 32 * 32, half = (std::min(32, dim - block_begin) + 1) / 2;
    const int i = c - block_begin;
    const int byte =
        static_cast<std::uint8_t>(codes[at(body, slot, (dim + 1) / 2, block_begin / 2 + i % half)]);
    const int code = i < half ? byte & 15 : byte >> 4;
    const std::size_t block = at(body, slot, (dim + 31) / 32, c / 32);
    return keys ? half_value(s.group_k_zero[cell]) + code * half_value(s.group_k_scale[cell])
                : half_value(rows.body_v_zero[block]) + code * half_value(rows.body_v_scale[block]);
  };
  stored_entries e;
  const auto read = [&](const std::vector<std::int8_t>& codes,
                        const std::vector<half_bits>& scalars, const std::vector<float>& table,
                        const std::vector<half_bits>& halves, const std::vector<float>& floats,
                        int dim, std::vector<double>& out) {
    const bool keys = &out == &e.k;
    for (int slot = 0; slot < s.body_size(); ++slot) {
      if (!s.body_group.empty()) {
        for (int c = 0; c < dim; ++c) out.push_back(grouped(keys, slot, c));
        continue;
      }
      const double scalar = scalars.empty() ? 1.0 : half_value(scalars[at(body, slot, 1, 0)]);
      for (int c = 0; c < dim; ++c) {
        const double channel = table.empty() ? 1.0 : table[static_cast<std::size_t>(c)];
        out.push_back(codes[at(body, slot, dim, c)] * scalar * channel);
      }
    }
    for (int slot = 0; slot < s.tail_size(); ++slot) {
      for (int c = 0; c < dim; ++c) {
        const std::size_t i = at(tail, slot, dim, c);
        out.push_back(halves.empty() ? static_cast<double>(floats[i]) : half_value(halves[i]));
      }
    }
  };
  read(rows.body_k, rows.body_k_scale, s.k_channel_scale, rows.tail_k, rows.tail_k32,
       shape.head_dim, e.k);
  read(rows.body_v, rows.body_v_scale, s.v_channel_scale, rows.tail_v, rows.tail_v32,
       shape.value_dim, e.v);
  return e;
}

// The reference for query head `head` of the layer over what the cache stores.
inline reference_result expected(const kv_cache& cache, int layer, const std::vector<float>& q,
                                 int head) {
  const cache_shape& s = cache.shape();
  const stored_entries e = read_entries(cache, layer, head / s.group());
  const auto first = q.begin() + std::int64_t{head} * s.head_dim;
  const std::vector<double> row(first, first + s.head_dim);
  double sink = 0;
  const bool has_sink = !s.sink_logits.empty();
  if (has_sink) sink = s.sink_logits[static_cast<std::size_t>(layer * s.q_heads + head)];
  return reference_attend(row, e.k, e.v, s.value_dim, s.softmax_scale, has_sink ? &sink : nullptr);
}

// Within tol * (1 + |b|), or equal (infinities). NaN never is.
inline bool near(double a, double b, double tol) {
  return a == b || std::fabs(a - b) <= tol * (1 + std::fabs(b));
}

// What attend may differ from the reference by, in units of 1 + |expected|: FP32 arithmetic, and
// where INT8 scores are integers, the query's 15 bits. Each channel of it is then within half a
// step, so that a score's error has a standard deviation of step / sqrt(12) * |codes|; eight of the
// largest are allowed.
inline double attend_tolerance(const kv_cache& cache, int layer, const std::vector<float>& q) {
  const cache_shape& s = cache.shape();
  double largest = 0;
  const bool integers = active_isa() == isa::avx512 && !is_grouped(cache.format());
  for (int h = 0; integers && h < s.q_heads; ++h) {
    const head_store& store = cache.head(layer, h / s.group());
    const auto dim = static_cast<std::size_t>(s.head_dim);
    const std::span<const float> row(q.data() + static_cast<std::size_t>(h) * dim, dim);
    const double step = static_cast<double>(integer_scores(cache, layer, h, row).scale);
    for (std::size_t i = 0; i < store.body_position.size(); ++i) {
      double squares = 0;
      for (std::size_t c = 0; c < dim; ++c) {
        squares += store.body_k[i * dim + c] * store.body_k[i * dim + c];
      }
      const double scalar = store.body_k_scale.empty() ? 1 : half_value(store.body_k_scale[i]);
      largest = std::max(largest, step * scalar * std::sqrt(squares / 12));
    }
  }
  return 1e-5 + 8 * largest;
}

// The largest error over o, lse and per-head mass, in units of 1 + |expected|; infinite where
// anything is NaN or an infinity is missed.
inline double worst_error(const kv_cache& cache, int layer, const std::vector<float>& q) {
  const cache_shape& s = cache.shape();
  const attended got = run_attend(cache, layer, q, mass_layout::per_query_head);
  double worst = 0;
  const auto see = [&worst](double a, double b) {
    const double error = a == b ? 0 : std::fabs(a - b) / (1 + std::fabs(b));
    if (!(error <= worst)) worst = error >= 0 ? error : INFINITY;
  };
  for (int h = 0; h < s.q_heads; ++h) {
    const reference_result want = expected(cache, layer, q, h);
    see(got.lse[static_cast<std::size_t>(h)], want.lse);
    for (int c = 0; c < s.value_dim; ++c) {
      see(got.o[static_cast<std::size_t>(h * s.value_dim + c)],
          want.o[static_cast<std::size_t>(c)]);
    }
    for (std::size_t i = 0; i < want.mass.size(); ++i) {
      see(got.mass[static_cast<std::size_t>(h * got.stride) + i], want.mass[i]);
    }
  }
  return worst;
}

}  // namespace kvreplay::kernels::testing
