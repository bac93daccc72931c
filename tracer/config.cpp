#include "tracer/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <utility>

#include "tracer/config_section.hpp"
#include "tracer/json_file.hpp"
#include "tracer/tokens.hpp"

namespace kvreplay::tracer {
namespace {

using nlohmann::json;

void require_whole_rotation(const section& values) {
  if (values.positive("partial_rotary_factor", 1.0) != 1.0) {
    values.complain("partial_rotary_factor other than 1 is not supported here");
  }
}

// The kind of scaling under either of its two keys.
std::string scaling_kind(const section& rope) {
  const std::string kind = rope.text("rope_type", rope.text("type", "default"));
  if (rope.find("type") != nullptr && rope.text("type", "") != kind) {
    rope.complain("rope_type and type disagree");
  }
  return kind;
}

void read_llama3_scaling(const section& rope, rope_config& out) {
  out.factor = rope.positive("factor", std::nullopt);
  out.low_freq_factor = rope.positive("low_freq_factor", std::nullopt);
  out.high_freq_factor = rope.positive("high_freq_factor", std::nullopt);
  out.original_max_position_embeddings =
      rope.positive("original_max_position_embeddings", std::nullopt);
  if (out.factor < 1) rope.complain(fmt::format("factor is {}, expected at least 1", out.factor));
  if (out.high_freq_factor <= out.low_freq_factor) {
    rope.complain(fmt::format("high_freq_factor is {}, expected more than low_freq_factor, {}",
                              out.high_freq_factor, out.low_freq_factor));
  }
}

// Theta and scaling of one rotation; `outer` may say theta too, then they must agree.
rope_config read_rotation(const section& rope, const section& outer, double default_theta) {
  rope_config out;
  require_whole_rotation(rope);
  out.theta = rope.positive("rope_theta", outer.positive("rope_theta", default_theta));
  if (outer.find("rope_theta") != nullptr && outer.positive("rope_theta", 1.0) != out.theta) {
    rope.complain("rope_theta differs from the one outside it");
  }
  out.scaling = scaling_kind(rope);
  if (out.scaling == "llama3") {
    read_llama3_scaling(rope, out);
  } else if (out.scaling == "linear") {
    out.factor = rope.positive("factor", std::nullopt);
  } else if (out.scaling != "default") {
    rope.complain(fmt::format("RoPE scaling {} is not supported; known: default, linear, llama3",
                              in_quotes(out.scaling)));
  }
  return out;
}

// transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters with both.
rope_config read_rope(const section& root, double default_theta) {
  require_whole_rotation(root);
  const json* scaling = root.find("rope_scaling");
  const json* parameters = root.find("rope_parameters");
  if (scaling != nullptr && parameters != nullptr && *scaling != *parameters) {
    root.complain("rope_scaling and rope_parameters are both present and differ");
  }
  const std::string key = parameters != nullptr ? "rope_parameters" : "rope_scaling";
  const json* values = parameters != nullptr ? parameters : scaling;
  if (values == nullptr) {
    rope_config out;
    out.theta = root.positive("rope_theta", default_theta);
    return out;
  }
  if (!values->is_object()) root.complain(key + " is not an object");
  const section rope(*values, root.where() + ": " + key);
  for (const auto& item : values->items()) {
    if (item.value().is_object()) {
      rope.complain("rotation per kind of layer (" + in_quotes(item.key()) + ") is not supported");
    }
  }
  return read_rotation(rope, root, default_theta);
}

// Gemma 3: windowed layers turn with a theta of their own, and only the global ones are scaled.
// transformers 5 has one object per kind of layer, transformers 4 rope_local_base_freq.
void read_two_rotations(const section& root, model_config& out) {
  const json* parameters = root.find("rope_parameters");
  const bool per_kind = parameters != nullptr && parameters->is_object() &&
                        parameters->contains("full_attention") &&
                        parameters->contains("sliding_attention");
  if (!per_kind) {
    out.rope = read_rope(root, 1e6);
    out.local_rope.emplace();
    out.local_rope->theta = root.positive("rope_local_base_freq", 1e4);
    return;
  }
  static const json nothing = json::object();
  const auto kind = [&](const char* name, double theta) {
    const json& values = (*parameters)[name];
    const std::string where = root.where() + ": rope_parameters: " + name;
    if (!values.is_object()) throw model_error(where + " is not an object");
    return read_rotation(section(values, where), section(nothing, where), theta);
  };
  out.rope = kind("full_attention", 1e6);
  out.local_rope = kind("sliding_attention", 1e4);
}

// transformers 5 names each layer's kind; -1: the file does not say, 0: global, 1: window.
std::vector<int> read_layer_types(const section& root, int n_layers) {
  std::vector<int> kinds(static_cast<size_t>(n_layers), -1);
  const json* types = root.find("layer_types");
  if (types == nullptr) return kinds;
  if (!types->is_array() || types->size() != kinds.size()) {
    root.complain(fmt::format("layer_types is not a list of {} names", n_layers));
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    const json& kind = (*types)[i];
    if (kind != "full_attention" && kind != "sliding_attention") {
      root.complain(
          fmt::format("layer_types[{}] is {}, expected full_attention or sliding_attention", i,
                      section::shown(kind)));
    }
    kinds[i] = kind == "sliding_attention" ? 1 : 0;
  }
  return kinds;
}

std::vector<int> windows_of(const std::vector<int>& kinds, int window) {
  std::vector<int> out;
  for (const int kind : kinds) out.push_back(kind == 1 ? window : 0);
  return out;
}

// llama has none; gpt2 neither.
std::vector<int> no_windows(const section& root, const model_config& c) {
  const std::vector<int> kinds = read_layer_types(root, c.n_layers);
  if (std::find(kinds.begin(), kinds.end(), 1) != kinds.end() ||
      root.flag("use_sliding_window", false) || root.find("sliding_window") != nullptr) {
    root.complain(
        "asks for sliding windows (sliding_window, use_sliding_window, layer_types) "
        "which model_type " +
        c.architecture + " does not have");
  }
  return std::vector<int>(kinds.size(), 0);
}

// Qwen2 and Qwen3: with use_sliding_window, by layer_types or from max_window_layers on.
std::vector<int> qwen_windows(const section& root, const model_config& c) {
  std::vector<int> kinds = read_layer_types(root, c.n_layers);
  if (!root.flag("use_sliding_window", false)) {
    if (std::find(kinds.begin(), kinds.end(), 1) != kinds.end()) {
      root.complain(
          "asks for sliding windows (sliding_window, use_sliding_window, layer_types) "
          "while use_sliding_window is not true");
    }
    return std::vector<int>(kinds.size(), 0);
  }
  const int window = root.size("sliding_window", INT32_MAX);
  if (root.find("layer_types") == nullptr) {
    const auto first = root.integer("max_window_layers", 0, INT32_MAX);
    if (!first) {
      root.complain(
          "use_sliding_window is true, but neither layer_types nor max_window_layers is there");
    }
    for (int layer = 0; layer < c.n_layers; ++layer) {
      kinds[static_cast<size_t>(layer)] = layer >= *first ? 1 : 0;
    }
  }
  return windows_of(kinds, window);
}

// Mistral: sliding_window in every layer (those of layer_types where the file has it), null: none.
std::vector<int> mistral_windows(const section& root, const model_config& c) {
  std::vector<int> kinds = read_layer_types(root, c.n_layers);
  if (root.find("sliding_window") == nullptr) return std::vector<int>(kinds.size(), 0);
  if (root.find("layer_types") == nullptr) kinds.assign(kinds.size(), 1);
  return windows_of(kinds, root.size("sliding_window", INT32_MAX));
}

// Gemma 3: by layer_types, else every sliding_window_pattern-th layer is global.
std::vector<int> gemma3_windows(const section& root, const model_config& c) {
  std::vector<int> kinds = read_layer_types(root, c.n_layers);
  if (root.find("layer_types") == nullptr) {
    const auto pattern = root.integer("sliding_window_pattern", 1, 4096).value_or(6);
    for (int layer = 0; layer < c.n_layers; ++layer) {
      kinds[static_cast<size_t>(layer)] = (layer + 1) % pattern == 0 ? 0 : 1;
    }
  }
  return windows_of(kinds, root.size("sliding_window", INT32_MAX));
}

void read_sizes(const section& root, model_config& out) {
  out.n_layers = root.size("num_hidden_layers", 4096);
  out.n_q_heads = root.size("num_attention_heads", 4096);
  out.n_kv_heads =
      static_cast<int>(root.integer("num_key_value_heads", 1, 4096).value_or(out.n_q_heads));
  out.hidden_size = root.size("hidden_size", 1 << 18);
  out.intermediate_size = root.size("intermediate_size", 1 << 20);
  out.max_position_embeddings = root.size("max_position_embeddings", INT32_MAX);
  out.logit_size = root.size("vocab_size", 1 << 24);
  if (out.n_q_heads % out.n_kv_heads != 0) {
    root.complain(fmt::format("num_key_value_heads {} does not divide num_attention_heads {}",
                              out.n_kv_heads, out.n_q_heads));
  }
  const auto head_dim = root.integer("head_dim", 1, 4096);
  if (!head_dim && out.hidden_size % out.n_q_heads != 0) {
    root.complain(
        fmt::format("head_dim is missing and num_attention_heads {} does not divide "
                    "hidden_size {}",
                    out.n_q_heads, out.hidden_size));
  }
  out.head_dim = static_cast<int>(head_dim.value_or(out.hidden_size / out.n_q_heads));
  out.softmax_scale = 1 / std::sqrt(static_cast<double>(out.head_dim));
  if (out.head_dim % 2 != 0) {
    root.complain(fmt::format("head_dim is {}, expected an even number", out.head_dim));
  }
}

void require_activation(const section& root, const char* key, const char* fallback,
                        std::initializer_list<const char*> known) {
  const std::string activation = root.text(key, fallback);
  for (const char* name : known) {
    if (activation == name) return;
  }
  root.complain(fmt::format("{} {} is not supported; known: {}", key, in_quotes(activation),
                            fmt::join(known, ", ")));
}

// Llama, Mistral, Qwen2, Qwen3: RMS norms, rotation, a gated MLP with SiLU.
void read_llama_like(const section& root, model_config& out) {
  require_activation(root, "hidden_act", "silu", {"silu"});
  read_sizes(root, out);
  out.norm_eps = root.positive("rms_norm_eps", 1e-6);
  out.tied_embeddings = root.flag("tie_word_embeddings", false);
  const std::string& kind = out.architecture;
  const bool attention_bias = kind != "qwen2" && root.flag("attention_bias", false);
  out.qkv_bias = kind == "qwen2" || attention_bias;
  out.o_bias = attention_bias;
  out.mlp_bias = kind == "llama" && root.flag("mlp_bias", false);
  out.qk_norm = kind == "qwen3";
  out.rope = read_rope(root, 10000.0);
  out.window = kind == "llama"     ? no_windows(root, out)
               : kind == "mistral" ? mistral_windows(root, out)
                                   : qwen_windows(root, out);
}

// Gemma 3, text: norms around attention and MLP, of which the files hold w for a factor 1 + w.
void read_gemma3(const section& root, model_config& out) {
  require_activation(root, "hidden_activation", "gelu_pytorch_tanh", {"gelu_pytorch_tanh"});
  read_sizes(root, out);
  out.norm_eps = root.positive("rms_norm_eps", 1e-6);
  out.tied_embeddings = root.flag("tie_word_embeddings", true);
  out.qkv_bias = out.o_bias = root.flag("attention_bias", false);
  out.activation = activation_kind::gelu_tanh;
  out.qk_norm = out.post_norms = out.norms_add_one = true;
  out.embedding_scale = std::sqrt(static_cast<double>(out.hidden_size));
  out.softmax_scale = 1 / std::sqrt(root.positive("query_pre_attn_scalar", 256.0));
  if (root.find("attn_logit_softcapping") != nullptr) {
    root.complain("attn_logit_softcapping is not supported: the cache's attention has no cap");
  }
  if (root.find("final_logit_softcapping") != nullptr) {
    out.final_softcap = root.positive("final_logit_softcapping", std::nullopt);
  }
  if (root.flag("use_bidirectional_attention", false)) {
    root.complain("use_bidirectional_attention is not supported");
  }
  read_two_rotations(root, out);
  out.window = gemma3_windows(root, out);
}

// GPT-2: learned positions, layer norms with biases, weights stored as [inputs, outputs].
void read_gpt2(const section& root, model_config& out) {
  require_activation(root, "activation_function", "gelu_new", {"gelu_new", "gelu_pytorch_tanh"});
  for (const char* key : {"scale_attn_by_inverse_layer_idx", "add_cross_attention"}) {
    if (root.flag(key, false)) root.complain(fmt::format("{} is not supported", key));
  }
  out.n_layers = root.size("n_layer", 4096);
  out.n_q_heads = out.n_kv_heads = root.size("n_head", 4096);
  out.hidden_size = root.size("n_embd", 1 << 18);
  out.intermediate_size = static_cast<int>(
      root.integer("n_inner", 1, 1 << 20).value_or(std::int64_t{4} * out.hidden_size));
  out.max_position_embeddings = root.size("n_positions", INT32_MAX);
  out.logit_size = root.size("vocab_size", 1 << 24);
  if (out.hidden_size % out.n_q_heads != 0) {
    root.complain(
        fmt::format("n_head {} does not divide n_embd {}", out.n_q_heads, out.hidden_size));
  }
  out.head_dim = out.hidden_size / out.n_q_heads;
  const bool scaled = root.flag("scale_attn_weights", true);
  out.softmax_scale = scaled ? 1 / std::sqrt(static_cast<double>(out.head_dim)) : 1.0;
  out.norm_eps = root.positive("layer_norm_epsilon", 1e-5);
  out.tied_embeddings = root.flag("tie_word_embeddings", true);
  out.qkv_bias = out.o_bias = out.mlp_bias = true;
  out.layer_norms = out.learned_positions = true;
  out.gated_mlp = false;
  out.activation = activation_kind::gelu_tanh;
  out.window = no_windows(root, out);
}

using reader_fn = void (*)(const section&, model_config&);
constexpr std::pair<const char*, reader_fn> readers[] = {
    {"llama", read_llama_like}, {"mistral", read_llama_like}, {"qwen2", read_llama_like},
    {"qwen3", read_llama_like}, {"gemma3_text", read_gemma3}, {"gpt2", read_gpt2}};

reader_fn reader_for(const section& root, const std::string& architecture) {
  std::string known;
  for (const auto& [name, reader] : readers) {
    if (architecture == name) return reader;
    known += fmt::format("{}{}", known.empty() ? "" : ", ", name);
  }
  root.complain(
      fmt::format("model_type {} is not supported; known: {}", in_quotes(architecture), known));
}

}  // namespace

model_config read_config(const std::string& directory) {
  namespace fs = std::filesystem;
  const std::string path = (fs::path(directory) / "config.json").string();
  const json values = read_json(path, 1 << 20, 16);
  if (!values.is_object()) throw model_error(path + ": not a JSON object");
  const section root(values, path);
  model_config out;
  out.architecture = root.text("model_type", "");
  const reader_fn read = reader_for(root, out.architecture);
  if (root.find("quantization_config") != nullptr) {
    root.complain(
        "quantised weights (quantization_config) are not supported; use F32, F16 or BF16");
  }
  read(root, out);
  if (!out.learned_positions) out.rope.dim = out.head_dim;
  if (out.local_rope) out.local_rope->dim = out.head_dim;
  const fs::path absolute = fs::absolute(directory).lexically_normal();
  out.name = (absolute.has_filename() ? absolute : absolute.parent_path()).filename().string();
  out.stored_dtype = root.text("dtype", root.text("torch_dtype", ""));
  out.vocab_size = static_cast<int>(
      std::min<std::int64_t>(tokenizer_size(directory).value_or(out.logit_size), out.logit_size));
  return out;
}

}  // namespace kvreplay::tracer
