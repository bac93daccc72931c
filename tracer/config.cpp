#include "tracer/config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>

#include "tracer/json_file.hpp"
#include "tracer/tokens.hpp"

namespace kvreplay::tracer {
namespace {

using nlohmann::json;

// One object of config.json; a null value counts as absent, as transformers has it.
class section {
 public:
  section(const json& values, std::string where) : values_(values), where_(std::move(where)) {}

  [[noreturn]] void complain(const std::string& text) const {
    throw model_error(where_ + ": " + text);
  }

  const json* find(const std::string& key) const {
    const auto found = values_.find(key);
    return found == values_.end() || found->is_null() ? nullptr : &*found;
  }

  std::optional<std::int64_t> integer(const std::string& key, std::int64_t low,
                                      std::int64_t high) const {
    const json* value = find(key);
    if (value == nullptr) return std::nullopt;
    const bool fits = value->is_number_integer() &&
                      !(value->is_number_unsigned() && value->get<std::uint64_t>() > INT64_MAX) &&
                      value->get<std::int64_t>() >= low && value->get<std::int64_t>() <= high;
    if (!fits) {
      complain(
          fmt::format("{} is {}, expected an integer {} .. {}", key, shown(*value), low, high));
    }
    return value->get<std::int64_t>();
  }

  int size(const std::string& key, std::int64_t high) const {
    const auto value = integer(key, 1, high);
    if (!value) complain(key + " is missing");
    return static_cast<int>(*value);
  }

  double positive(const std::string& key, std::optional<double> fallback) const {
    const json* value = find(key);
    if (value == nullptr) {
      if (!fallback) complain(key + " is missing");
      return *fallback;
    }
    if (!value->is_number() || !std::isfinite(value->get<double>()) || value->get<double>() <= 0) {
      complain(fmt::format("{} is {}, expected a number above 0", key, shown(*value)));
    }
    return value->get<double>();
  }

  bool flag(const std::string& key, bool fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) {
      complain(fmt::format("{} is {}, expected true or false", key, shown(*value)));
    }
    return value->get<bool>();
  }

  std::string text(const std::string& key, const std::string& fallback) const {
    const json* value = find(key);
    if (value == nullptr) return fallback;
    if (!value->is_string()) {
      complain(fmt::format("{} is {}, expected a string", key, shown(*value)));
    }
    return value->get<std::string>();
  }

  static std::string shown(const json& value) { return in_quotes(value.dump()); }
  const std::string& where() const { return where_; }

 private:
  const json& values_;
  std::string where_;
};

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

// transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters with both.
rope_config read_rope(const section& root, int head_dim) {
  rope_config out;
  out.dim = head_dim;
  require_whole_rotation(root);
  const json* scaling = root.find("rope_scaling");
  const json* parameters = root.find("rope_parameters");
  if (scaling != nullptr && parameters != nullptr && *scaling != *parameters) {
    root.complain("rope_scaling and rope_parameters are both present and differ");
  }
  const std::string key = parameters != nullptr ? "rope_parameters" : "rope_scaling";
  const json* values = parameters != nullptr ? parameters : scaling;
  if (values == nullptr) {
    out.theta = root.positive("rope_theta", 10000.0);
    return out;
  }
  if (!values->is_object()) root.complain(key + " is not an object");
  const section rope(*values, root.where() + ": " + key);
  for (const auto& item : values->items()) {
    if (item.value().is_object()) {
      rope.complain("rotation per kind of layer (" + in_quotes(item.key()) + ") is not supported");
    }
  }
  require_whole_rotation(rope);
  out.theta = rope.positive("rope_theta", root.positive("rope_theta", 10000.0));
  if (root.find("rope_theta") != nullptr && root.positive("rope_theta", 1.0) != out.theta) {
    rope.complain("rope_theta differs from the one outside it");
  }
  out.scaling = scaling_kind(rope);
  if (out.scaling == "llama3") {
    read_llama3_scaling(rope, out);
  } else if (out.scaling != "default") {
    rope.complain(fmt::format("RoPE scaling {} is not supported; known: default, llama3",
                              in_quotes(out.scaling)));
  }
  return out;
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

std::vector<int> read_windows(const section& root, const std::string& architecture, int n_layers) {
  std::vector<int> windows(static_cast<size_t>(n_layers), 0);
  const std::vector<int> kinds = read_layer_types(root, n_layers);
  const bool slides = root.flag("use_sliding_window", false);
  if (!slides || architecture != "qwen2") {
    const bool named = std::find(kinds.begin(), kinds.end(), 1) != kinds.end();
    if (named || slides || (architecture == "llama" && root.find("sliding_window") != nullptr)) {
      root.complain("asks for sliding windows (sliding_window, use_sliding_window, layer_types) " +
                    (architecture == "qwen2"
                         ? std::string("while use_sliding_window is not true")
                         : "which model_type " + architecture + " does not have"));
    }
    return windows;
  }
  const int window = root.size("sliding_window", INT32_MAX);
  const bool by_depth = root.find("layer_types") == nullptr;
  const auto first = root.integer("max_window_layers", 0, INT32_MAX);
  if (by_depth && !first) {
    root.complain(
        "use_sliding_window is true, but neither layer_types nor max_window_layers is there");
  }
  for (int layer = 0; layer < n_layers; ++layer) {
    const auto i = static_cast<size_t>(layer);
    if (by_depth ? layer >= *first : kinds[i] == 1) windows[i] = window;
  }
  return windows;
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

void read_kind(const section& root, model_config& out) {
  out.architecture = root.text("model_type", "");
  if (out.architecture != "llama" && out.architecture != "qwen2") {
    root.complain(fmt::format("model_type {} is not supported; known: llama, qwen2",
                              in_quotes(out.architecture)));
  }
  const std::string activation = root.text("hidden_act", "silu");
  if (activation != "silu") {
    root.complain(
        fmt::format("hidden_act {} is not supported; known: silu", in_quotes(activation)));
  }
  if (root.find("quantization_config") != nullptr) {
    root.complain(
        "quantised weights (quantization_config) are not supported; use F32, F16 or BF16");
  }
}

}  // namespace

model_config read_config(const std::string& directory) {
  namespace fs = std::filesystem;
  const std::string path = (fs::path(directory) / "config.json").string();
  const json values = read_json(path, 1 << 20, 16);
  if (!values.is_object()) throw model_error(path + ": not a JSON object");
  const section root(values, path);
  model_config out;
  read_kind(root, out);
  read_sizes(root, out);
  const fs::path absolute = fs::absolute(directory).lexically_normal();
  out.name = (absolute.has_filename() ? absolute : absolute.parent_path()).filename().string();
  out.norm_eps = root.positive("rms_norm_eps", 1e-6);
  out.tied_embeddings = root.flag("tie_word_embeddings", false);
  const bool qwen2 = out.architecture == "qwen2";
  out.qkv_bias = qwen2 || root.flag("attention_bias", false);
  out.o_bias = !qwen2 && root.flag("attention_bias", false);
  out.mlp_bias = !qwen2 && root.flag("mlp_bias", false);
  out.rope = read_rope(root, out.head_dim);
  out.window = read_windows(root, out.architecture, out.n_layers);
  out.stored_dtype = root.text("dtype", root.text("torch_dtype", ""));
  out.vocab_size = static_cast<int>(
      std::min<std::int64_t>(tokenizer_size(directory).value_or(out.logit_size), out.logit_size));
  return out;
}

}  // namespace kvreplay::tracer
