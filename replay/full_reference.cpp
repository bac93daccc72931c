#include "replay/full_reference.hpp"

#include <tbb/parallel_for.h>
#include <tbb/task_arena.h>

#include <algorithm>
#include <cmath>
#include <functional>

namespace kvreplay::replay {

full_reference::full_reference(const kernels::cache_shape& shape, const layer_data& data,
                               parts wanted)
    : shape_(&shape), data_(&data), wanted_(wanted) {
  wanted_.rows = wanted.rows || wanted.bound || data.o.empty() || data.lse.empty();
}

void full_reference::load(std::int64_t first, std::int64_t steps) {
  first_ = first;
  steps_ = steps;
  if (!wanted_.rows) return;
  stride_ = first + steps;
  const auto heads = static_cast<size_t>(steps * shape_->q_heads);
  rows_.resize(heads * static_cast<size_t>(stride_));
  totals_.assign(heads, 0.0);
  if (wanted_.bound) prefixes_.resize(heads * static_cast<size_t>(stride_ + 1));
  const bool recorded = data_->q.empty();
  if (data_->lse.empty() && !recorded) lse_.resize(heads);
  if (data_->o.empty() && !recorded) o_.resize(static_cast<size_t>(steps * data_->o_width));
  // Inside a layer's own task: without isolation a waiting thread could start another layer and
  // hold two layers in memory.
  tbb::this_task_arena::isolate([&] {
    tbb::parallel_for(std::int64_t{0}, steps, [&](std::int64_t i) {
      const std::int64_t t = first + i;
      const size_t at = index(t, 0);
      full_rows_of(*shape_, *data_, t, 1, stride_, &rows_[at * static_cast<size_t>(stride_)],
                   lse_.empty() ? nullptr : &lse_[at]);
      for (int h = 0; h < shape_->q_heads; ++h) {
        double sum = 0;
        for (const float a : row(t, h)) sum += a;
        totals_[index(t, h)] = sum;
      }
      if (wanted_.bound) sort_prefixes(t);
      if (data_->o.empty() && !recorded) compute_output(t);
    });
  });
}

std::span<const float> full_reference::row(std::int64_t t, int q_head) const {
  return {&rows_[index(t, q_head) * static_cast<size_t>(stride_)], static_cast<size_t>(t + 1)};
}

double full_reference::total(std::int64_t t, int q_head) const { return totals_[index(t, q_head)]; }

double full_reference::best(std::int64_t t, int q_head, std::int64_t n) const {
  return prefixes_[index(t, q_head) * static_cast<size_t>(stride_ + 1) +
                   static_cast<size_t>(std::min(n, t + 1))];
}

const float* full_reference::o(std::int64_t t) const {
  return data_->o.empty() ? &o_[static_cast<size_t>((t - first_) * data_->o_width)]
                          : &data_->o[static_cast<size_t>((t - data_->first_row) * data_->o_width)];
}

float full_reference::lse(std::int64_t t, int q_head) const {
  return data_->lse.empty()
             ? lse_[index(t, q_head)]
             : data_->lse[static_cast<size_t>((t - data_->first_row) * shape_->q_heads + q_head)];
}

void full_reference::sort_prefixes(std::int64_t t) {
  std::vector<float> sorted;
  for (int h = 0; h < shape_->q_heads; ++h) {
    const auto source = row(t, h);
    sorted.assign(source.begin(), source.end());
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    float* out = &prefixes_[index(t, h) * static_cast<size_t>(stride_ + 1)];
    double sum = 0;
    out[0] = 0;
    for (size_t i = 0; i < sorted.size(); ++i) {
      sum += sorted[i];
      out[i + 1] = static_cast<float>(sum);
    }
  }
}

void full_reference::compute_output(std::int64_t t) {
  const auto dim = static_cast<size_t>(shape_->value_dim);
  float* out = &o_[static_cast<size_t>((t - first_) * data_->o_width)];
  std::vector<double> sum(dim);
  for (int h = 0; h < shape_->q_heads; ++h) {
    std::fill(sum.begin(), sum.end(), 0.0);
    const auto a = row(t, h);
    const int g = h / shape_->group();
    for (size_t i = 0; i < a.size(); ++i) {
      if (a[i] == 0) continue;
      const float* v = data_->v_at(static_cast<std::int64_t>(i)) + static_cast<size_t>(g) * dim;
      for (size_t c = 0; c < dim; ++c) sum[c] += static_cast<double>(a[i]) * v[c];
    }
    for (size_t c = 0; c < dim; ++c) {
      out[static_cast<size_t>(h) * dim + c] = static_cast<float>(sum[c]);
    }
  }
}

}  // namespace kvreplay::replay
