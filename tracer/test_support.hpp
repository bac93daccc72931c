// What the tests of this folder share: checkpoints made on the spot, folders that clean up.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

namespace kvreplay::tracer {

inline std::string model_directory(const std::string& name) {
  return std::string(KVREPLAY_SOURCE_DIR) + "/tracer/testdata/models/" + name;
}

// A fresh folder, removed at the end of the scope.
class scratch_folder {
 public:
  scratch_folder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvreplay-tracer-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~scratch_folder() { std::filesystem::remove_all(path_); }
  scratch_folder(const scratch_folder&) = delete;
  scratch_folder& operator=(const scratch_folder&) = delete;

  std::string file(const std::string& name) const { return (path_ / name).string(); }
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// A safetensors file from a header's text and the data after it.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  const std::uint64_t size = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &size, 8);
  return out + header + data;
}

struct float_tensor {
  std::vector<std::int64_t> shape;
  std::vector<float> values;
};
using float_tensors = std::map<std::string, float_tensor>;

inline std::string float_file(const float_tensors& tensors) {
  nlohmann::json header = nlohmann::json::object();
  std::string data;
  for (const auto& [name, tensor] : tensors) {
    const size_t begin = data.size();
    data.append(reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size() * 4);
    header[name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return safetensors_bytes(header.dump(), data);
}

// config.json of a small Llama, to be altered by a test.
inline nlohmann::json small_config() {
  return {{"model_type", "llama"},
          {"hidden_size", 16},
          {"intermediate_size", 24},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"head_dim", 8},
          {"vocab_size", 20},
          {"max_position_embeddings", 32768},
          {"rms_norm_eps", 1e-6},
          {"rope_theta", 500000.0},
          {"hidden_act", "silu"},
          {"tie_word_embeddings", true},
          {"torch_dtype", "float32"}};
}

// Random weights for such a config; `biases` adds those of q, k and v.
inline float_tensors small_weights(const nlohmann::json& config, bool biases = false) {
  std::mt19937 generator(11);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  float_tensors out;
  const auto add = [&](const std::string& name, std::vector<std::int64_t> shape) {
    std::int64_t count = 1;
    for (const std::int64_t extent : shape) count *= extent;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) x = normal(generator);
    out[name] = {std::move(shape), std::move(values)};
  };
  const std::int64_t hidden = config["hidden_size"], inner = config["intermediate_size"];
  const std::int64_t q =
      config["num_attention_heads"].get<std::int64_t>() * config["head_dim"].get<std::int64_t>();
  const std::int64_t kv =
      config["num_key_value_heads"].get<std::int64_t>() * config["head_dim"].get<std::int64_t>();
  add("model.embed_tokens.weight", {config["vocab_size"], hidden});
  add("model.norm.weight", {hidden});
  for (int layer = 0; layer < config["num_hidden_layers"]; ++layer) {
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    add(at + "input_layernorm.weight", {hidden});
    add(at + "post_attention_layernorm.weight", {hidden});
    add(at + "self_attn.q_proj.weight", {q, hidden});
    add(at + "self_attn.k_proj.weight", {kv, hidden});
    add(at + "self_attn.v_proj.weight", {kv, hidden});
    add(at + "self_attn.o_proj.weight", {hidden, q});
    add(at + "mlp.gate_proj.weight", {inner, hidden});
    add(at + "mlp.up_proj.weight", {inner, hidden});
    add(at + "mlp.down_proj.weight", {hidden, inner});
    if (!biases) continue;
    add(at + "self_attn.q_proj.bias", {q});
    add(at + "self_attn.k_proj.bias", {kv});
    add(at + "self_attn.v_proj.bias", {kv});
  }
  return out;
}

inline void write_model(const std::string& directory, const nlohmann::json& config,
                        const float_tensors& tensors) {
  write_file(directory + "/config.json", config.dump());
  write_file(directory + "/model.safetensors", float_file(tensors));
}

// The message of the exception that `call` throws; empty where it throws none. One line only.
template <class function>
std::string message_of(const function& call) {
  try {
    call();
  } catch (const std::exception& e) {
    const std::string text = e.what();
    return text.find('\n') == std::string::npos ? text : "more than one line: " + text;
  }
  return "";
}

inline bool mentions(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace kvreplay::tracer
