#include "replay/layer_data.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/half.hpp"
#include "replay/projection.hpp"

namespace kvreplay::replay {
namespace {

std::vector<float> widen(const std::vector<traces::half_bits>& bits) {
  std::vector<float> out(bits.size());
  std::transform(bits.begin(), bits.end(), out.begin(), kernels::half_to_float);
  return out;
}

}  // namespace

layer_data load_layer(const traces::reader& trace, int sequence, int layer, bool value_norm) {
  const auto& info = trace.sequence(sequence);
  const auto& model = trace.model();
  auto slice = trace.read_layer(sequence, layer, 0, info.n_tokens);
  layer_data data;
  data.layer = layer;
  data.n_prompt = info.n_prompt;
  data.n_tokens = info.n_tokens;
  data.first_row = slice.row_begin;
  data.q_width = std::int64_t{model.n_q_heads} * model.head_dim;
  data.k_width = std::int64_t{model.n_kv_heads} * model.head_dim;
  data.v_width = std::int64_t{model.n_kv_heads} * model.value_dim;
  data.o_width = std::int64_t{model.n_q_heads} * model.value_dim;
  data.q = widen(slice.q);
  data.k = widen(slice.k);
  data.v = widen(slice.v);
  data.o = std::move(slice.o);
  data.lse = std::move(slice.lse);
  data.residual_norm = std::move(slice.residual_norm);
  data.retention = std::move(slice.retention);
  data.image_score = std::move(slice.image_score);
  if (value_norm) {
    data.value_norm = std::move(slice.value_norm);
    if (data.value_norm.empty()) {
      const projection_shape shape{model.n_q_heads, model.value_dim, model.hidden_size};
      data.value_norm = value_norms(shape, output_weights(shape, trace.wo(layer)), model.n_kv_heads,
                                    data.v, data.n_tokens);
    }
  }
  if (!model.rope_inv_freq.empty()) {
    const auto width = static_cast<std::ptrdiff_t>(model.rope_dim / 2);
    const auto row =
        model.rope_inv_freq.begin() + (model.rope_inv_freq_rows > 1 ? layer : 0) * width;
    data.rope_inv_freq.assign(row, row + width);
  }
  if (data.q.empty() && trace.layer(sequence, layer).has_attn) {
    data.attention_position = trace.attention_positions(sequence, layer);
    for (std::int64_t r = 0; r < std::ssize(data.attention_position); ++r) {
      const auto row = trace.attention_row(sequence, layer, r);
      data.attention.insert(data.attention.end(), row.begin(), row.end());
    }
  }
  const bool few_rows = data.first_row > 0 || data.q.empty();
  if (few_rows && trace.layer(sequence, layer).has_column_sum) {
    data.column_sum = trace.column_sum(sequence, layer);
  }
  return data;
}

layer_inputs inputs_of(const layer_data& data) {
  layer_inputs inputs;
  inputs.retention = data.retention;
  inputs.value_norm = data.value_norm;
  inputs.rope_inv_freq = data.rope_inv_freq;
  return inputs;
}

namespace {

void recorded_rows(const kernels::cache_shape& shape, const layer_data& data, std::int64_t first,
                   std::int64_t steps, std::int64_t stride, float* rows) {
  for (std::int64_t i = 0; i < steps; ++i) {
    const auto at =
        std::lower_bound(data.attention_position.begin(), data.attention_position.end(), first + i);
    if (at == data.attention_position.end() || *at != first + i) {
      throw traces::trace_error(
          fmt::format("layer {} has no attention row of position {}; record with --attention full",
                      data.layer, first + i));
    }
    const std::int64_t row = at - data.attention_position.begin();
    for (int h = 0; h < shape.q_heads; ++h) {
      const auto* from =
          &data.attention[static_cast<size_t>((row * shape.q_heads + h) * data.n_tokens)];
      float* to = rows + (i * shape.q_heads + h) * stride;
      const std::int64_t seen = std::min(stride, data.n_tokens);
      std::transform(from, from + seen, to, kernels::half_to_float);
      std::fill(to + seen, to + stride, 0.0F);
    }
  }
}

}  // namespace

void full_rows_of(const kernels::cache_shape& shape, const layer_data& data, std::int64_t first,
                  std::int64_t steps, std::int64_t stride, float* rows, float* lse) {
  if (data.q.empty()) return recorded_rows(shape, data, first, steps, stride, rows);
  const float* known =
      data.lse.empty() ? nullptr
                       : &data.lse[static_cast<size_t>((first - data.first_row) * shape.q_heads)];
  kernels::full_rows(shape, 0, data.q_at(first), data.k.data(), known, first, steps, stride, rows,
                     known == nullptr ? lse : nullptr);
}

void reduce_row(const kernels::cache_shape& shape, const float* rows, std::int64_t stride,
                std::int64_t n, kernels::mass_layout reduce, std::vector<float>& out) {
  const bool layer_mean = reduce == kernels::mass_layout::layer_mean;
  const int count = layer_mean ? shape.q_heads : shape.group();
  const double divisor =
      reduce == kernels::mass_layout::mean || layer_mean ? static_cast<double>(count) : 1.0;
  out.resize(static_cast<size_t>(shape.kv_heads * n));
  for (int g = 0; g < shape.kv_heads; ++g) {
    const float* group = rows + (layer_mean ? 0 : std::int64_t{g} * count * stride);
    for (std::int64_t i = 0; i < n; ++i) {
      double value = group[i];
      for (int h = 1; h < count; ++h) {
        const double x = group[h * stride + i];
        value = reduce == kernels::mass_layout::max ? std::max(value, x) : value + x;
      }
      out[static_cast<size_t>(g * n + i)] = static_cast<float>(value / divisor);
    }
  }
}

void prompt_observations::each_of_last(
    std::int64_t n, kernels::mass_layout reduce,
    const std::function<void(std::int64_t, const float*)>& visit) const {
  constexpr std::int64_t at_once = 16;
  const std::int64_t end = data_->n_prompt;
  const std::int64_t begin = std::max({std::int64_t{0}, end - n, data_->first_row});
  std::vector<float> rows, reduced;
  for (std::int64_t first = begin; first < end; first += at_once) {
    const std::int64_t count = std::min(at_once, end - first);
    rows.resize(static_cast<size_t>(count * shape_->q_heads * end));
    full_rows_of(*shape_, *data_, first, count, end, rows.data());
    for (std::int64_t i = 0; i < count; ++i) {
      reduce_row(*shape_, &rows[static_cast<size_t>(i * shape_->q_heads * end)], end, end, reduce,
                 reduced);
      visit(first + i, reduced.data());
    }
  }
}

// As kernels::mean_of_rows and column_sums, from the recorded rows: rows < 0 is the sum over all.
void prompt_observations::mean_of_recorded(std::int64_t rows, kernels::mass_layout reduce,
                                           std::vector<float>& out) const {
  const std::int64_t n = data_->n_prompt, window = shape_->window_of(0);
  std::vector<double> sums(static_cast<size_t>(shape_->kv_heads * n), 0.0);
  std::vector<std::int64_t> seen(static_cast<size_t>(n), 0);
  each_of_last(rows < 0 ? n : rows, reduce, [&](std::int64_t row, const float* mass) {
    const std::int64_t begin = window > 0 ? std::max<std::int64_t>(0, row + 1 - window) : 0;
    for (std::int64_t i = begin; i <= row; ++i) ++seen[static_cast<size_t>(i)];
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += mass[i];
  });
  out.resize(sums.size());
  for (size_t i = 0; i < sums.size(); ++i) {
    const auto count = seen[i % static_cast<size_t>(n)];
    out[i] =
        static_cast<float>(rows < 0 || count == 0 ? sums[i] : sums[i] / static_cast<double>(count));
  }
}

const std::vector<float>& prompt_observations::scores(const policies::score_rule& rule,
                                                      kernels::mass_layout reduce) {
  const std::scoped_lock lock(mutex_);
  static const std::vector<float> nothing;
  std::int64_t rows = 0;
  switch (rule.prompt) {
    case policies::prompt_seed::none:
    case policies::prompt_seed::last_history:
      return nothing;
    case policies::prompt_seed::column_sums:
      rows = -1;
      break;
    case policies::prompt_seed::mean_of_last:
      rows = std::min<std::int64_t>(rule.obs, data_->n_prompt);
      break;
    case policies::prompt_seed::last_row:
      rows = 1;
      break;
  }
  auto [at, fresh] = known_.try_emplace(key{rows, reduce});
  if (!fresh) return at->second;
  kernels::prompt_rows prompt;
  prompt.q = data_->q.data();
  prompt.k = data_->k.data();
  prompt.lse = data_->lse.empty() ? nullptr : data_->lse.data();
  prompt.first_row = data_->first_row;
  prompt.n_prompt = data_->n_prompt;
  if (data_->q.empty()) {
    if (rows < 0 && !data_->column_sum.empty()) {
      reduce_column_sums(reduce, at->second);
    } else {
      mean_of_recorded(rows, reduce, at->second);
    }
  } else if (rows < 0 && data_->first_row > 0) {
    reduce_column_sums(reduce, at->second);
  } else if (rows < 0) {
    prompt.progress = progress_;
    kernels::column_sums(*shape_, 0, prompt, reduce, at->second);
  } else {
    std::vector<float> last;
    kernels::last_rows(*shape_, 0, prompt, rows, last);
    kernels::mean_of_rows(*shape_, 0, last, rows, data_->n_prompt, reduce, at->second);
  }
  return at->second;
}

// The recorded sums are per query head; means and sums over heads commute with the sum over rows.
void prompt_observations::reduce_column_sums(kernels::mass_layout reduce,
                                             std::vector<float>& out) const {
  const auto n = static_cast<size_t>(data_->n_prompt);
  const auto heads = static_cast<size_t>(shape_->kv_heads);
  const auto group = static_cast<size_t>(shape_->group());
  const bool layer_mean = reduce == kernels::mass_layout::layer_mean;
  const size_t count = layer_mean ? heads * group : group;
  const double scale = reduce == kernels::mass_layout::sum ? 1.0 : 1.0 / static_cast<double>(count);
  out.assign(heads * n, 0.0F);
  for (size_t g = 0; g < heads; ++g) {
    for (size_t i = 0; i < n; ++i) {
      double total = 0;
      for (size_t h = 0; h < count; ++h) {
        total += data_->column_sum[((layer_mean ? 0 : g * group) + h) * n + i];
      }
      out[g * n + i] = static_cast<float>(total * scale);
    }
  }
}

}  // namespace kvreplay::replay
