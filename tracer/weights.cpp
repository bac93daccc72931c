#include "tracer/weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <span>
#include <string_view>

#include "tracer/json_file.hpp"
#include "tracer/safetensors.hpp"

namespace kvreplay::tracer {
namespace {

using shape_list = std::vector<std::int64_t>;

// FNV-1a, 64 bits (http://www.isthe.com/chongo/tech/comp/fnv/).
class hash64 {
 public:
  void add(std::string_view bytes) {
    for (const char c : bytes) {
      state_ = (state_ ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    }
    state_ = (state_ ^ 0xffu) * 0x100000001b3u;  // so that ("ab", "c") and ("a", "bc") differ
  }
  std::string hex() const { return fmt::format("{:016x}", state_); }

 private:
  std::uint64_t state_ = 0xcbf29ce484222325u;
};

std::vector<float> poisoned(std::int64_t count) {
  return std::vector<float>(static_cast<size_t>(count), std::numeric_limits<float>::quiet_NaN());
}

class loader {
 public:
  loader(const std::string& directory, const model_config& config, std::vector<std::string>* notes)
      : config_(config),
        notes_(notes),
        store_(directory, notes),
        gpt2_(config.learned_positions),
        embedding_(gpt2_ ? "wte.weight" : "embed_tokens.weight") {
    const std::string usual = gpt2_ ? "transformer." : "model.";
    if (store_.has(usual + embedding_)) {
      prefix_ = usual;
    } else if (!store_.has(embedding_)) {
      throw model_error(fmt::format("{}: tensor '{}{}' is missing", directory, usual, embedding_));
    }
    add_config();
  }

  model_weights load() {
    model_weights out;
    const std::int64_t hidden = config_.hidden_size;
    out.embedding = poisoned(config_.logit_size * hidden);
    take(prefix_ + embedding_, {config_.logit_size, hidden}, out.embedding);
    if (gpt2_) {
      out.positions = poisoned(config_.max_position_embeddings * hidden);
      take(prefix_ + "wpe.weight", {config_.max_position_embeddings, hidden}, out.positions);
    }
    out.final_norm = norm(prefix_ + (gpt2_ ? "ln_f" : "norm"), hidden);
    for (int layer = 0; layer < config_.n_layers; ++layer) {
      out.layers.push_back(gpt2_ ? load_gpt2_layer(layer) : load_layer(layer));
    }
    load_head(out);
    note_unused();
    out.fingerprint = hash_.hex();
    return out;
  }

 private:
  // Everything in the config that changes the numbers, in a fixed spelling.
  void add_config() {
    const auto& c = config_;
    hash_.add(fmt::format("{} {} {} {} {} {} {} {} {}", c.architecture, c.n_layers, c.n_q_heads,
                          c.n_kv_heads, c.head_dim, c.hidden_size, c.intermediate_size,
                          c.logit_size, c.norm_eps));
    hash_.add(fmt::format("{} {} {} {} {} {} {}", c.rope.theta, c.rope.scaling, c.rope.factor,
                          c.rope.low_freq_factor, c.rope.high_freq_factor,
                          c.rope.original_max_position_embeddings, c.rope.dim));
    hash_.add(fmt::format("{} {} {} {}", c.tied_embeddings, c.qkv_bias, c.o_bias, c.mlp_bias));
    hash_.add(fmt::format("{}", fmt::join(c.window, " ")));
    if (c.local_rope) {
      hash_.add(fmt::format("{} {} {}", c.local_rope->theta, c.local_rope->scaling,
                            c.local_rope->factor));
    }
    // What llama and qwen2 have no choice in adds nothing, so that their fingerprints stay.
    if (c.final_softcap != 0) hash_.add(fmt::format("{}", c.final_softcap));
    if (c.post_norms || c.learned_positions) hash_.add(fmt::format("{}", c.softmax_scale));
  }

  // Reads one tensor into its place and makes sure that nothing but finite values stands there.
  void take(const std::string& name, const shape_list& shape, std::span<float> out) {
    store_.read_into(name, shape, out);
    const auto bad =
        std::find_if(out.begin(), out.end(), [](float x) { return !std::isfinite(x); });
    const tensor_entry& entry = store_.entry(name);
    if (bad != out.end()) {
      throw model_error(fmt::format("{}: tensor {}: value {} is {}, expected finite weights",
                                    entry.file, in_quotes(name), bad - out.begin(), *bad));
    }
    used_.insert(name);
    hash_.add(name);
    hash_.add(fmt::format("{} {}", entry.dtype, fmt::join(shape, " ")));
    hash_.add(store_.first_bytes(name, 64));
  }

  std::vector<float> vector(const std::string& name, std::int64_t size) {
    auto out = poisoned(size);
    take(name, {size}, out);
    return out;
  }

  norm_weights norm(const std::string& name, std::int64_t size) {
    norm_weights out{vector(name + ".weight", size), {}};
    if (config_.layer_norms) out.bias = vector(name + ".bias", size);
    if (config_.norms_add_one) {
      for (float& w : out.weight) w += 1;
    }
    return out;
  }

  struct part {
    std::string name;
    int outputs;
  };

  // Several linear layers over the same input as one, rows in the order of `parts`.
  dense_weights dense(const std::vector<part>& parts, int inputs, bool bias) {
    dense_weights out;
    out.inputs = inputs;
    for (const part& p : parts) out.outputs += p.outputs;
    out.weight = poisoned(std::int64_t{out.outputs} * inputs);
    if (bias) out.bias = poisoned(out.outputs);
    std::int64_t row = 0;
    for (const part& p : parts) {
      const auto first = static_cast<size_t>(row), count = static_cast<size_t>(p.outputs);
      take(p.name + ".weight", {p.outputs, inputs},
           std::span(out.weight)
               .subspan(first * static_cast<size_t>(inputs), count * static_cast<size_t>(inputs)));
      const std::string name = p.name + ".bias";
      if (bias) take(name, {p.outputs}, std::span(out.bias).subspan(first, count));
      if (!bias && store_.has(name)) {
        throw model_error(fmt::format("{}: tensor {} is there, but config.json says no such bias",
                                      store_.entry(name).file, in_quotes(name)));
      }
      row += p.outputs;
    }
    return out;
  }

  layer_weights load_layer(int layer) {
    const auto& c = config_;
    const std::string at = fmt::format("{}layers.{}.", prefix_, layer);
    const std::string attention = at + "self_attn.", mlp = at + "mlp.";
    const int q = c.n_q_heads * c.head_dim, kv = c.n_kv_heads * c.head_dim;
    layer_weights out;
    out.attention_norm = norm(at + "input_layernorm", c.hidden_size);
    out.qkv =
        dense({{attention + "q_proj", q}, {attention + "k_proj", kv}, {attention + "v_proj", kv}},
              c.hidden_size, c.qkv_bias);
    if (c.qk_norm) {
      out.q_norm = norm(attention + "q_norm", c.head_dim);
      out.k_norm = norm(attention + "k_norm", c.head_dim);
    }
    out.o = dense({{attention + "o_proj", c.hidden_size}}, q, c.o_bias);
    if (c.post_norms)
      out.post_attention_norm = norm(at + "post_attention_layernorm", c.hidden_size);
    out.mlp_norm =
        norm(at + (c.post_norms ? "pre_feedforward_layernorm" : "post_attention_layernorm"),
             c.hidden_size);
    out.gate_up =
        dense({{mlp + "gate_proj", c.intermediate_size}, {mlp + "up_proj", c.intermediate_size}},
              c.hidden_size, c.mlp_bias);
    out.down = dense({{mlp + "down_proj", c.hidden_size}}, c.intermediate_size, c.mlp_bias);
    if (c.post_norms) out.post_mlp_norm = norm(at + "post_feedforward_layernorm", c.hidden_size);
    return out;
  }

  // GPT-2's Conv1D keeps [inputs, outputs].
  dense_weights conv1d(const std::string& name, int inputs, int outputs) {
    dense_weights out;
    out.inputs = inputs;
    out.outputs = outputs;
    auto stored = poisoned(std::int64_t{inputs} * outputs);
    take(name + ".weight", {inputs, outputs}, stored);
    out.weight.resize(stored.size());
    for (std::int64_t i = 0; i < inputs; ++i) {
      for (std::int64_t j = 0; j < outputs; ++j) {
        out.weight[static_cast<size_t>(j * inputs + i)] =
            stored[static_cast<size_t>(i * outputs + j)];
      }
    }
    out.bias = vector(name + ".bias", outputs);
    return out;
  }

  layer_weights load_gpt2_layer(int layer) {
    const auto& c = config_;
    const std::string at = fmt::format("{}h.{}.", prefix_, layer);
    const int hidden = c.hidden_size;
    layer_weights out;
    out.attention_norm = norm(at + "ln_1", hidden);
    out.qkv = conv1d(at + "attn.c_attn", hidden, 3 * hidden);
    out.o = conv1d(at + "attn.c_proj", hidden, hidden);
    out.mlp_norm = norm(at + "ln_2", hidden);
    out.gate_up = conv1d(at + "mlp.c_fc", hidden, c.intermediate_size);
    out.down = conv1d(at + "mlp.c_proj", c.intermediate_size, hidden);
    return out;
  }

  void load_head(model_weights& out) {
    const std::string name = "lm_head.weight";
    if (!store_.has(name)) {
      if (config_.tied_embeddings) return;
      throw model_error(fmt::format("{}: tensor {} is missing and tie_word_embeddings is not true",
                                    store_.entry(prefix_ + embedding_).file, in_quotes(name)));
    }
    out.head = poisoned(std::int64_t{config_.logit_size} * config_.hidden_size);
    take(name, {config_.logit_size, config_.hidden_size}, out.head);
    if (!config_.tied_embeddings) return;
    if (out.head == out.embedding) {
      out.head = {};
    } else if (notes_ != nullptr) {
      notes_->push_back(
          fmt::format("{}: tensor {} differs from the embedding though "
                      "tie_word_embeddings is true; the file's head is used",
                      store_.entry(name).file, in_quotes(name)));
    }
  }

  void note_unused() {
    std::string first;
    std::int64_t count = 0;
    for (const auto& [name, entry] : store_.entries()) {
      if (used_.count(name) != 0) continue;
      if (count++ == 0) first = in_quotes(name);
    }
    if (count > 0 && notes_ != nullptr) {
      notes_->push_back(
          fmt::format("{} tensors of the checkpoint are not used, the first is {}", count, first));
    }
  }

  const model_config& config_;
  std::vector<std::string>* notes_;
  tensor_store store_;
  bool gpt2_;
  std::string embedding_, prefix_;
  std::set<std::string> used_;
  hash64 hash_;
};

}  // namespace

model_weights load_weights(const std::string& directory, const model_config& config,
                           std::vector<std::string>* notes) {
  return loader(directory, config, notes).load();
}

}  // namespace kvreplay::tracer
