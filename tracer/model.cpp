#include "tracer/model.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>

#include "tracer/linear.hpp"
#include "tracer/rope.hpp"
#include "tracer/weights.hpp"

namespace kvreplay::tracer {

struct model::impl {
  model_config config;
  model_weights weights;
  void check_rows(std::span<const std::int32_t> tokens,
                  std::span<const std::int64_t> positions) const;
  std::vector<float> embed(std::span<const std::int32_t> tokens,
                           std::span<const std::int64_t> positions) const;
  void norm(const norm_weights& weights, const float* x, std::int64_t rows, float* y) const;
  void attention(int layer, std::span<const std::int64_t> positions, const rotary_table& rotary,
                 const attention_fn& attend, std::vector<float>& residual) const;
  std::vector<float> attention_update(int layer, const float* o, std::int64_t rows) const;
  void activate(const std::vector<float>& in, std::int64_t rows, std::vector<float>& out) const;
  void mlp(int layer, std::int64_t rows, std::vector<float>& residual) const;
};

namespace {

size_t count(std::int64_t rows, std::int64_t width) { return static_cast<size_t>(rows * width); }

// x += y, element by element.
void add_to(std::vector<float>& x, const std::vector<float>& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

// Columns begin .. begin + width - 1 of packed [rows, stride] as their own matrix.
std::vector<float> columns(const std::vector<float>& packed, std::int64_t rows, std::int64_t stride,
                           std::int64_t begin, std::int64_t width) {
  std::vector<float> out(count(rows, width));
  for (std::int64_t r = 0; r < rows; ++r) {
    std::copy_n(packed.data() + r * stride + begin, width, out.data() + r * width);
  }
  return out;
}

}  // namespace

void model::impl::check_rows(std::span<const std::int32_t> tokens,
                             std::span<const std::int64_t> positions) const {
  if (tokens.size() != positions.size()) {
    throw model_error(fmt::format("{}: {} tokens with {} positions", config.name, tokens.size(),
                                  positions.size()));
  }
  for (size_t r = 0; r < tokens.size(); ++r) {
    if (tokens[r] < 0 || tokens[r] >= config.logit_size) {
      throw model_error(fmt::format("{}: token id {} at position {}, expected 0 .. {}", config.name,
                                    tokens[r], positions[r], config.logit_size - 1));
    }
    if (positions[r] < 0 || positions[r] >= config.max_position_embeddings) {
      throw model_error(fmt::format("{}: position {}, the model knows 0 .. {}", config.name,
                                    positions[r], config.max_position_embeddings - 1));
    }
  }
}

std::vector<float> model::impl::embed(std::span<const std::int32_t> tokens,
                                      std::span<const std::int64_t> positions) const {
  const std::int64_t hidden = config.hidden_size;
  const auto scale = static_cast<float>(config.embedding_scale);
  std::vector<float> out(count(static_cast<std::int64_t>(tokens.size()), hidden));
  for (size_t r = 0; r < tokens.size(); ++r) {
    float* row = out.data() + static_cast<std::int64_t>(r) * hidden;
    std::copy_n(weights.embedding.data() + tokens[r] * hidden, hidden, row);
    if (scale != 1) {
      for (std::int64_t i = 0; i < hidden; ++i) row[i] *= scale;
    }
    if (weights.positions.empty()) continue;
    const float* position = weights.positions.data() + positions[r] * hidden;
    for (std::int64_t i = 0; i < hidden; ++i) row[i] += position[i];
  }
  return out;
}

void model::impl::norm(const norm_weights& w, const float* x, std::int64_t rows, float* y) const {
  if (w.bias.empty()) {
    rms_norm(w.weight, config.norm_eps, x, rows, y);
  } else {
    layer_norm(w.weight, w.bias, config.norm_eps, x, rows, y);
  }
}

void model::impl::attention(int layer, std::span<const std::int64_t> positions,
                            const rotary_table& rotary, const attention_fn& attend,
                            std::vector<float>& residual) const {
  const layer_weights& w = weights.layers[static_cast<size_t>(layer)];
  const auto rows = static_cast<std::int64_t>(positions.size());
  const std::int64_t q_width = std::int64_t{config.n_q_heads} * config.head_dim;
  const std::int64_t kv_width = std::int64_t{config.n_kv_heads} * config.head_dim;
  const std::int64_t stride = q_width + 2 * kv_width;
  std::vector<float> normed(residual.size());
  norm(w.attention_norm, residual.data(), rows, normed.data());
  std::vector<float> packed(count(rows, stride));
  apply_linear(w.qkv.view(), normed.data(), rows, packed.data());
  std::vector<float> q = columns(packed, rows, stride, 0, q_width);
  std::vector<float> k = columns(packed, rows, stride, q_width, kv_width);
  std::vector<float> v = columns(packed, rows, stride, q_width + kv_width, kv_width);
  if (!w.q_norm.weight.empty()) {
    norm(w.q_norm, q.data(), rows * config.n_q_heads, q.data());
    norm(w.k_norm, k.data(), rows * config.n_kv_heads, k.data());
  }
  rotary.rotate(q.data(), config.n_q_heads, config.head_dim);
  rotary.rotate(k.data(), config.n_kv_heads, config.head_dim);
  std::vector<float> o(q.size());
  attention_block block{layer, rows, positions, q, k, v, o};
  attend(block);
  add_to(residual, attention_update(layer, o.data(), rows));
}

// What a layer's attention output o adds to the residual stream, [rows, hidden_size].
std::vector<float> model::impl::attention_update(int layer, const float* o,
                                                 std::int64_t rows) const {
  const layer_weights& w = weights.layers[static_cast<size_t>(layer)];
  std::vector<float> out(count(rows, config.hidden_size));
  apply_linear(w.o.view(), o, rows, out.data());
  if (!w.post_attention_norm.weight.empty()) {
    norm(w.post_attention_norm, out.data(), rows, out.data());
  }
  return out;
}

void model::impl::activate(const std::vector<float>& in, std::int64_t rows,
                           std::vector<float>& out) const {
  const int n = config.intermediate_size;
  if (!config.gated_mlp) return gelu(in.data(), rows, n, out.data());
  if (config.activation == activation_kind::silu) return silu_gate(in.data(), rows, n, out.data());
  gelu_gate(in.data(), rows, n, out.data());
}

void model::impl::mlp(int layer, std::int64_t rows, std::vector<float>& residual) const {
  const layer_weights& w = weights.layers[static_cast<size_t>(layer)];
  std::vector<float> normed(residual.size());
  norm(w.mlp_norm, residual.data(), rows, normed.data());
  std::vector<float> inner(count(rows, w.gate_up.outputs));
  apply_linear(w.gate_up.view(), normed.data(), rows, inner.data());
  std::vector<float> hidden(count(rows, config.intermediate_size));
  activate(inner, rows, hidden);
  apply_linear(w.down.view(), hidden.data(), rows, normed.data());
  if (!w.post_mlp_norm.weight.empty()) norm(w.post_mlp_norm, normed.data(), rows, normed.data());
  add_to(residual, normed);
}

model::model(std::unique_ptr<impl> p) : impl_(std::move(p)) {}
model::model(model&&) noexcept = default;
model& model::operator=(model&&) noexcept = default;
model::~model() = default;

model model::load(const std::string& directory, std::vector<std::string>* notes) {
  auto p = std::make_unique<impl>();
  p->config = read_config(directory);
  p->weights = load_weights(directory, p->config, notes);
  return model(std::move(p));
}

const model_config& model::config() const { return impl_->config; }

std::string model::fingerprint() const { return impl_->weights.fingerprint; }

std::vector<float> model::forward(std::span<const std::int32_t> tokens,
                                  std::span<const std::int64_t> positions,
                                  const attention_fn& attend,
                                  const residual_fn& after_layer) const {
  impl_->check_rows(tokens, positions);
  const model_config& config = impl_->config;
  const rotary_table global(inverse_frequencies(config.rope), positions);
  const rotary_table local(inverse_frequencies(config.local_rope.value_or(config.rope)),
                           config.local_rope ? positions : std::span<const std::int64_t>());
  std::vector<float> residual = impl_->embed(tokens, positions);
  for (int layer = 0; layer < config.n_layers; ++layer) {
    const bool turns_locally = &rope_of(config, layer) != &config.rope;
    impl_->attention(layer, positions, turns_locally ? local : global, attend, residual);
    impl_->mlp(layer, static_cast<std::int64_t>(tokens.size()), residual);
    if (after_layer) after_layer(layer, residual);
  }
  return residual;
}

void model::logits(std::span<const float> residual, std::int64_t rows,
                   std::vector<float>& out) const {
  const model_config& config = impl_->config;
  const model_weights& weights = impl_->weights;
  if (residual.size() != count(rows, config.hidden_size)) {
    throw model_error(fmt::format("{}: {} residual values for {} rows of {}", config.name,
                                  residual.size(), rows, config.hidden_size));
  }
  std::vector<float> normed(residual.size());
  impl_->norm(weights.final_norm, residual.data(), rows, normed.data());
  const std::vector<float>& head = weights.head.empty() ? weights.embedding : weights.head;
  out.resize(count(rows, config.logit_size));
  apply_linear({config.logit_size, config.hidden_size, head.data(), nullptr, 0}, normed.data(),
               rows, out.data());
  if (config.final_softcap == 0) return;
  const auto cap = static_cast<float>(config.final_softcap);
  for (float& x : out) x = cap * std::tanh(x / cap);
}

std::vector<float> model::attention_update(int layer, std::span<const float> o,
                                           std::int64_t rows) const {
  const std::int64_t width = std::int64_t{impl_->config.n_q_heads} * impl_->config.head_dim;
  if (layer < 0 || layer >= impl_->config.n_layers || o.size() != count(rows, width)) {
    throw model_error(fmt::format("{}: layer {}, {} attention values for {} rows of {}",
                                  impl_->config.name, layer, o.size(), rows, width));
  }
  return impl_->attention_update(layer, o.data(), rows);
}

std::vector<float> model::wo(int layer) const {
  const dense_weights& o = impl_->weights.layers.at(static_cast<size_t>(layer)).o;
  std::vector<float> out(o.weight.size());
  tbb::parallel_for(0, o.inputs, [&](int i) {
    for (std::int64_t j = 0; j < o.outputs; ++j) {
      out[static_cast<size_t>(i * std::int64_t{o.outputs} + j)] =
          o.weight[static_cast<size_t>(j * o.inputs + i)];
    }
  });
  return out;
}

void model::value_norm(int layer, std::span<const float> v, std::int64_t rows,
                       std::vector<float>& out) const {
  const model_config& config = impl_->config;
  const dense_weights& o = impl_->weights.layers.at(static_cast<size_t>(layer)).o;
  const std::int64_t kv_width = std::int64_t{config.n_kv_heads} * config.head_dim;
  const int group = config.n_q_heads / config.n_kv_heads;
  if (v.size() != count(rows, kv_width)) {
    throw model_error(
        fmt::format("{}: {} values for {} rows of {}", config.name, v.size(), rows, kv_width));
  }
  out.resize(count(rows, config.n_q_heads));
  std::vector<float> projected(count(rows, config.hidden_size));
  for (std::int64_t h = 0; h < config.n_q_heads; ++h) {
    const linear_view slice{config.hidden_size, config.head_dim,
                            o.weight.data() + h * config.head_dim, nullptr, o.inputs};
    apply_linear(slice, v.data() + h / group * config.head_dim, rows, projected.data(), kv_width);
    tbb::parallel_for(std::int64_t{0}, rows, [&](std::int64_t r) {
      const float* row = projected.data() + r * config.hidden_size;
      double sum = 0;
      for (int i = 0; i < config.hidden_size; ++i) sum += std::abs(row[i]);
      out[static_cast<size_t>(r * config.n_q_heads + h)] = static_cast<float>(sum);
    });
  }
}

std::vector<double> model::rope_inv_freq(int layer) const {
  if (layer < 0 || layer >= impl_->config.n_layers) {
    throw model_error(fmt::format("{}: layer {}, expected 0 .. {}", impl_->config.name, layer,
                                  impl_->config.n_layers - 1));
  }
  return inverse_frequencies(rope_of(impl_->config, layer));
}

}  // namespace kvreplay::tracer
