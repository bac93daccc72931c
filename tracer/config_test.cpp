#include "tracer/config.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

#include "tracer/test_support.hpp"

namespace kvreplay::tracer {
namespace {

using nlohmann::json;

model_config parse(const json& config) {
  const scratch_folder folder;
  write_file(folder.file("config.json"), config.dump());
  return read_config(folder.path());
}

std::string refusal(const json& config) {
  const std::string message = message_of([&] { parse(config); });
  CHECK(mentions(message, "config.json: "));
  return message;
}

json with(const std::string& key, const json& value) {
  json config = small_config();
  config[key] = value;
  return config;
}

TEST_CASE("the golden configurations") {
  const model_config llama = read_config(model_directory("llama"));
  CHECK(llama.architecture == "llama");
  CHECK(llama.name == "llama");
  CHECK(llama.head_dim == 8);
  CHECK(llama.n_kv_heads == 2);
  CHECK(llama.tied_embeddings);
  CHECK_FALSE(llama.qkv_bias);
  CHECK(llama.window == std::vector<int>{0, 0, 0});
  const model_config scaled = read_config(model_directory("llama3_scaled") + "/");
  CHECK(scaled.name == "llama3_scaled");
  CHECK(scaled.rope.scaling == "llama3");
  CHECK(scaled.rope.factor == 32);
  CHECK(scaled.hidden_size != scaled.n_q_heads * scaled.head_dim);
  const model_config qwen2 = read_config(model_directory("qwen2"));
  CHECK(qwen2.qkv_bias);
  CHECK_FALSE(qwen2.o_bias);
  CHECK(read_config(model_directory("llama_bf16_sharded")).stored_dtype == "bfloat16");
}

TEST_CASE("what is not supported is refused in one line") {
  CHECK(mentions(refusal(with("model_type", "phi3")), "'phi3' is not supported; known: llama, "));
  CHECK(mentions(message_of([] { read_config("no/such/folder"); }), "no/such/folder/config.json"));
  CHECK(mentions(refusal(with("model_type", nullptr)), "model_type"));
  CHECK(mentions(refusal(with("hidden_act", "gelu")), "hidden_act 'gelu'"));
  CHECK(mentions(refusal(with("quantization_config", {{"bits", 4}})), "quantization_config"));
  CHECK(mentions(refusal(with("partial_rotary_factor", 0.5)), "partial_rotary_factor"));
  for (const std::string kind : {"yarn", "dynamic", "longrope", "mrope"}) {
    CHECK(mentions(refusal(with("rope_scaling", {{"type", kind}, {"factor", 2.0}})),
                   "'" + kind + "'"));
    CHECK(
        mentions(refusal(with("rope_parameters", {{"rope_type", kind}, {"rope_theta", 500000.0}})),
                 "'" + kind + "'"));
  }
}

TEST_CASE("sizes are checked") {
  CHECK(mentions(refusal(with("hidden_size", nullptr)), "hidden_size is missing"));
  CHECK(mentions(refusal(with("hidden_size", -16)), "hidden_size is '-16'"));
  CHECK(mentions(refusal(with("hidden_size", 16.5)), "hidden_size"));
  CHECK(mentions(refusal(with("vocab_size", 18446744073709551615u)), "vocab_size"));
  CHECK(mentions(refusal(with("num_key_value_heads", 3)), "does not divide"));
  CHECK(mentions(refusal(with("head_dim", 7)), "even"));
  CHECK(mentions(refusal(with("rms_norm_eps", 0)), "rms_norm_eps"));
  CHECK(mentions(refusal(with("rope_theta", "big")), "rope_theta"));
  CHECK(mentions(refusal(with("tie_word_embeddings", 1)), "tie_word_embeddings"));
  CHECK(mentions(refusal(json::array()), "not a JSON object"));
  json derived = with("head_dim", nullptr);
  CHECK(parse(derived).head_dim == 4);
  derived["hidden_size"] = 18;
  CHECK(mentions(refusal(derived), "head_dim is missing"));
}

TEST_CASE("both spellings of rotary scaling and of the stored type") {
  json scaling = {{"factor", 32.0},
                  {"low_freq_factor", 1.0},
                  {"high_freq_factor", 4.0},
                  {"original_max_position_embeddings", 8192}};
  json typed = scaling, rope_typed = scaling, parameters = scaling;
  typed["type"] = "llama3";
  rope_typed["rope_type"] = "llama3";
  parameters["rope_type"] = "llama3";
  parameters["rope_theta"] = 500000.0;
  json modern = with("rope_parameters", parameters);
  modern.erase("rope_theta");
  modern.erase("torch_dtype");
  modern["dtype"] = "bfloat16";
  const model_config a = parse(with("rope_scaling", typed));
  const model_config b = parse(with("rope_scaling", rope_typed));
  const model_config c = parse(modern);
  for (const model_config* config : {&a, &b, &c}) {
    CHECK(config->rope.scaling == "llama3");
    CHECK(config->rope.theta == 500000);
    CHECK(inverse_frequencies(config->rope) == inverse_frequencies(a.rope));
  }
  CHECK(a.stored_dtype == "float32");
  CHECK(c.stored_dtype == "bfloat16");
  CHECK(parse(with("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 500000.0}}))
            .rope.scaling == "default");
  CHECK(parse(with("rope_scaling", nullptr)).rope.scaling == "default");
  json incomplete = rope_typed;
  incomplete.erase("low_freq_factor");
  CHECK(mentions(refusal(with("rope_scaling", incomplete)), "low_freq_factor is missing"));
  json contradictory = rope_typed;
  contradictory["type"] = "default";
  CHECK(mentions(refusal(with("rope_scaling", contradictory)), "disagree"));
  CHECK(mentions(refusal(with("rope_parameters", {{"rope_type", "default"}, {"rope_theta", 1e4}})),
                 "differs"));
  CHECK(mentions(refusal(with("rope_parameters", {{"full_attention", {{"rope_type", "default"}}}})),
                 "per kind of layer"));
}

TEST_CASE("inverse frequencies of Llama 3.2's scaling") {
  rope_config rope;
  rope.theta = 500000;
  rope.dim = 64;
  const auto plain = inverse_frequencies(rope);
  rope.scaling = "llama3";
  rope.factor = 32;
  rope.low_freq_factor = 1;
  rope.high_freq_factor = 4;
  rope.original_max_position_embeddings = 8192;
  const auto scaled = inverse_frequencies(rope);
  REQUIRE(scaled.size() == 32);
  for (size_t i = 0; i < 32; ++i) {
    CAPTURE(i);
    CHECK(plain[i] == doctest::Approx(std::exp(-std::log(500000.0) * static_cast<double>(i) / 32)));
    if (i <= 14) {
      CHECK(scaled[i] == plain[i]);
    } else if (i <= 17) {
      CHECK(scaled[i] < plain[i]);
      CHECK(scaled[i] > plain[i] / 32);
    } else {
      CHECK(scaled[i] == doctest::Approx(plain[i] / 32).epsilon(1e-14));
    }
  }
}

TEST_CASE("Qwen2's sliding windows in both generations' terms") {
  json config = with("model_type", "qwen2");
  config["num_hidden_layers"] = 4;
  config["sliding_window"] = 12;
  CHECK(parse(config).window == std::vector<int>{0, 0, 0, 0});
  config["use_sliding_window"] = true;
  CHECK(mentions(refusal(config), "max_window_layers"));
  config["max_window_layers"] = 3;
  CHECK(parse(config).window == std::vector<int>{0, 0, 0, 12});
  config["layer_types"] = {"sliding_attention", "full_attention", "sliding_attention",
                           "full_attention"};
  CHECK(parse(config).window == std::vector<int>{12, 0, 12, 0});
  config["use_sliding_window"] = false;
  CHECK(mentions(refusal(config), "sliding windows"));
  config["layer_types"] = {"full_attention", "full_attention", "full_attention",
                           "chunked_attention"};
  CHECK(mentions(refusal(config), "layer_types[3]"));
  config["layer_types"] = {"full_attention"};
  CHECK(mentions(refusal(config), "list of 4"));
  CHECK(mentions(refusal(with("sliding_window", 4096)), "llama does not have"));
}

TEST_CASE("Mistral's window is every layer's") {
  json config = with("model_type", "mistral");
  CHECK(parse(config).window == std::vector<int>{0, 0});
  config["sliding_window"] = nullptr;
  CHECK(parse(config).window == std::vector<int>{0, 0});
  config["sliding_window"] = 9;
  CHECK(parse(config).window == std::vector<int>{9, 9});
}

TEST_CASE("Gemma 3's windows and rotations in both generations' terms") {
  json old = with("model_type", "gemma3_text");
  old["num_hidden_layers"] = 4;
  old["sliding_window"] = 7;
  old["sliding_window_pattern"] = 3;
  old["hidden_activation"] = "gelu_pytorch_tanh";
  old["query_pre_attn_scalar"] = 64;
  old["rope_local_base_freq"] = 10000.0;
  old["rope_theta"] = 1000000.0;
  old["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
  json modern = old;
  for (const char* key :
       {"sliding_window_pattern", "rope_local_base_freq", "rope_theta", "rope_scaling"}) {
    modern.erase(key);
  }
  modern["layer_types"] = {"sliding_attention", "sliding_attention", "full_attention",
                           "sliding_attention"};
  modern["rope_parameters"] = {
      {"full_attention", {{"rope_type", "linear"}, {"rope_theta", 1e6}, {"factor", 8.0}}},
      {"sliding_attention", {{"rope_type", "default"}, {"rope_theta", 1e4}}}};
  for (const json& config : {old, modern}) {
    const model_config c = parse(config);
    CHECK(c.window == std::vector<int>{7, 7, 0, 7});
    CHECK(c.softmax_scale == 0.125);
    CHECK(c.embedding_scale == 4);
    CHECK(inverse_frequencies(rope_of(c, 2))[1] == doctest::Approx(std::pow(1e6, -0.25) / 8));
    CHECK(inverse_frequencies(rope_of(c, 3))[1] == doctest::Approx(std::pow(1e4, -0.25)));
  }
  old["final_logit_softcapping"] = 30.0;
  CHECK(parse(old).final_softcap == 30);
  old["attn_logit_softcapping"] = 50.0;
  CHECK(mentions(refusal(old), "attn_logit_softcapping"));
}

TEST_CASE("GPT-2's own words") {
  json config = {{"model_type", "gpt2"}, {"n_embd", 12},     {"n_layer", 2},      {"n_head", 3},
                 {"n_positions", 16},    {"vocab_size", 20}, {"n_inner", nullptr}};
  const model_config c = parse(config);
  CHECK(c.intermediate_size == 48);
  CHECK(c.n_kv_heads == 3);
  CHECK(c.rope.dim == 0);
  CHECK(c.tied_embeddings);
  config["activation_function"] = "relu";
  CHECK(mentions(refusal(config), "'relu'"));
  config["activation_function"] = "gelu_new";
  config["scale_attn_by_inverse_layer_idx"] = true;
  CHECK(mentions(refusal(config), "scale_attn_by_inverse_layer_idx"));
}

TEST_CASE("a padded vocabulary is told from the tokenizer's real ids") {
  const scratch_folder folder;
  write_file(folder.file("config.json"), small_config().dump());
  CHECK(read_config(folder.path()).vocab_size == 20);
  write_file(folder.file("tokenizer.json"),
             R"({"model":{"vocab":{"a":0,"b":14}},"added_tokens":[{"id":16,"content":"<s>"}]})");
  const model_config padded = read_config(folder.path());
  CHECK(padded.vocab_size == 17);
  CHECK(padded.logit_size == 20);
  write_file(folder.file("tokenizer.json"), R"({"model":{"vocab":{"a":-1}}})");
  CHECK(mentions(message_of([&] { read_config(folder.path()); }), "tokenizer.json: a token id"));
}

}  // namespace
}  // namespace kvreplay::tracer
