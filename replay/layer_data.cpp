#include "replay/layer_data.hpp"

#include <algorithm>

#include "kernels/half.hpp"

namespace kvreplay::replay {
namespace {

std::vector<float> widen(const std::vector<traces::half_bits>& bits) {
  std::vector<float> out(bits.size());
  std::transform(bits.begin(), bits.end(), out.begin(), kernels::half_to_float);
  return out;
}

}  // namespace

layer_data load_layer(const traces::reader& trace, int sequence, int layer) {
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
  if (data.first_row > 0 && trace.layer(sequence, layer).has_column_sum) {
    data.column_sum = trace.column_sum(sequence, layer);
  }
  return data;
}

const std::vector<float>& prompt_observations::scores(const policies::score_rule& rule,
                                                      kernels::mass_layout reduce) {
  const std::scoped_lock lock(mutex_);
  static const std::vector<float> nothing;
  std::int64_t rows = 0;
  switch (rule.prompt) {
    case policies::prompt_seed::none:
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
  if (rows < 0 && data_->first_row > 0) {
    reduce_column_sums(reduce, at->second);
  } else if (rows < 0) {
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
