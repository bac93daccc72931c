#include "traces/attention_row.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "traces/float16.hpp"

namespace kvreplay::traces {

namespace {

// Eight sums side by side: a fixed order that the compiler may still keep in vector registers.
double dot(const double* a, const double* b, std::int64_t n) {
  double sums[8] = {};
  std::int64_t c = 0;
  for (; c + 8 <= n; c += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += a[c + j] * b[c + j];
  }
  double rest = 0;
  for (; c < n; ++c) rest += a[c] * b[c];
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7])) +
         rest;
}

double absolute_dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t c = 0; c < n; ++c) sum += std::fabs(a[c] * b[c]);
  return sum;
}

// o += sum of p[i] * v[i] over n rows, four at a time to spare stores.
void add_values(const double* p, const double* v, std::int64_t n, std::int64_t dim, double* o) {
  std::int64_t i = 0;
  for (; i + 4 <= n; i += 4, v += 4 * dim) {
    const double p0 = p[i], p1 = p[i + 1], p2 = p[i + 2], p3 = p[i + 3];
    for (std::int64_t c = 0; c < dim; ++c) {
      o[c] += (p0 * v[c] + p1 * v[dim + c]) + (p2 * v[2 * dim + c] + p3 * v[3 * dim + c]);
    }
  }
  for (; i < n; ++i, v += dim) {
    for (std::int64_t c = 0; c < dim; ++c) o[c] += p[i] * v[c];
  }
}

void widen_heads(const std::vector<half_bits>& rows, std::int64_t dim,
                 std::vector<std::vector<double>>& to) {
  const auto heads = static_cast<std::int64_t>(to.size());
  const std::int64_t count = static_cast<std::int64_t>(rows.size()) / (heads * dim);
  for (std::int64_t t = 0; t < count; ++t) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const half_bits* from = &rows[static_cast<size_t>((t * heads + h) * dim)];
      for (std::int64_t c = 0; c < dim; ++c) {
        to[static_cast<size_t>(h)].push_back(static_cast<double>(half_to_float(from[c])));
      }
    }
  }
}

}  // namespace

wide_cache::wide_cache(const model_info& model, std::int64_t capacity)
    : head_dim_(model.head_dim), value_dim_(model.value_dim) {
  const auto heads = static_cast<size_t>(model.n_kv_heads);
  k_.resize(heads);
  v_.resize(heads);
  largest_.resize(heads);
  for (size_t h = 0; h < heads; ++h) {
    k_[h].reserve(static_cast<size_t>(capacity * head_dim_));
    v_[h].reserve(static_cast<size_t>(capacity * value_dim_));
    largest_[h].reserve(static_cast<size_t>(capacity));
  }
}

void wide_cache::append(const layer_slice& slice) {
  widen_heads(slice.k, head_dim_, k_);
  widen_heads(slice.v, value_dim_, v_);
  for (size_t h = 0; h < v_.size(); ++h) {
    const auto dim = static_cast<size_t>(value_dim_);
    for (size_t row = largest_[h].size(); (row + 1) * dim <= v_[h].size(); ++row) {
      double largest = 0;
      for (size_t c = 0; c < dim; ++c) largest = std::max(largest, std::fabs(v_[h][row * dim + c]));
      largest_[h].push_back(largest);
    }
  }
}

void recompute_row(const wide_cache& cache, const model_info& model, int layer, int head,
                   std::int64_t t, const double* q, bool bound, attention_result& out) {
  const int kv = head / model.group();
  const std::int64_t window = model.window[static_cast<size_t>(layer)];
  const std::int64_t first = window > 0 ? std::max<std::int64_t>(0, t - window + 1) : 0;
  const double none = -std::numeric_limits<double>::infinity();
  const double sink =
      model.sinks.empty() ? none : model.sinks[static_cast<size_t>(layer * model.n_q_heads + head)];
  out.p.assign(static_cast<size_t>(t + 1), 0);
  out.o.assign(static_cast<size_t>(model.value_dim), 0);
  out.score_error = out.largest_value = 0;
  double top = sink;
  for (std::int64_t i = first; i <= t; ++i) {
    const double score = model.softmax_scale * dot(q, cache.k(kv, i), model.head_dim);
    out.p[static_cast<size_t>(i)] = score;
    top = std::max(top, score);
    if (!bound) continue;
    out.score_error = std::max(out.score_error, absolute_dot(q, cache.k(kv, i), model.head_dim));
    out.largest_value = std::max(out.largest_value, cache.largest_value(kv, i));
  }
  out.score_error *= model.softmax_scale * 0x1p-10;
  double sum = std::exp(sink - top);
  for (std::int64_t i = first; i <= t; ++i) {
    double& weight = out.p[static_cast<size_t>(i)];
    weight = std::exp(weight - top);
    sum += weight;
  }
  for (std::int64_t i = first; i <= t; ++i) out.p[static_cast<size_t>(i)] /= sum;
  add_values(&out.p[static_cast<size_t>(first)], cache.v(kv, first), t + 1 - first, model.value_dim,
             out.o.data());
  out.lse = top + std::log(sum);
  out.sink_share = std::exp(sink - out.lse);
}

}  // namespace kvreplay::traces
