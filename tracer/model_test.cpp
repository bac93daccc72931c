#include "tracer/model.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>
#include <numeric>

#include "tracer/full_attention.hpp"
#include "tracer/rope.hpp"
#include "tracer/test_support.hpp"

namespace kvreplay::tracer {
namespace {

// A forward pass with full attention over everything in one call; keeps every layer's k.
struct whole_pass {
  std::vector<std::vector<float>> k;
  std::vector<float> residual, logits;

  whole_pass(const model& m, const std::vector<std::int32_t>& tokens, std::int64_t first = 0) {
    std::vector<std::int64_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), first);
    const auto attend = [&](attention_block& block) {
      const model_config& c = m.config();
      k.emplace_back(block.k.begin(), block.k.end());
      std::vector<float> lse(static_cast<size_t>(block.rows * c.n_q_heads));
      full_attention({c.n_q_heads, c.n_kv_heads, c.head_dim, c.head_dim,
                      1 / std::sqrt(static_cast<double>(c.head_dim)), 0},
                     0, block.rows, block.q.data(), block.k.data(), block.v.data(), block.o.data(),
                     lse.data());
    };
    residual = m.forward(tokens, positions, attend);
    m.logits(residual, static_cast<std::int64_t>(tokens.size()), logits);
  }
};

const std::vector<std::int32_t> some_tokens = {3, 1, 4, 1, 5, 9, 2, 6};

TEST_CASE("tied and untied heads, present and absent") {
  const nlohmann::json tied = small_config();
  nlohmann::json untied = tied;
  untied["tie_word_embeddings"] = false;
  const float_tensors without = small_weights(tied);
  float_tensors equal = without, different = without;
  equal["lm_head.weight"] = without.at("model.embed_tokens.weight");
  different["lm_head.weight"] = equal["lm_head.weight"];
  for (float& x : different["lm_head.weight"].values) x *= 2;

  const auto logits = [](const nlohmann::json& config, const float_tensors& tensors,
                         std::vector<std::string>& notes) {
    const scratch_folder folder;
    write_model(folder.path(), config, tensors);
    return whole_pass(model::load(folder.path(), &notes), some_tokens).logits;
  };
  std::vector<std::string> notes;
  const auto from_embedding = logits(tied, without, notes);
  CHECK(logits(tied, equal, notes) == from_embedding);
  CHECK(logits(untied, equal, notes) == from_embedding);
  CHECK(notes.empty());
  const auto from_head = logits(tied, different, notes);
  REQUIRE(notes.size() == 1);
  CHECK(mentions(notes[0], "lm_head.weight"));
  for (size_t i = 0; i < from_head.size(); ++i) CHECK(from_head[i] == 2 * from_embedding[i]);
  CHECK(
      mentions(message_of([&] { logits(untied, without, notes); }), "'lm_head.weight' is missing"));
}

TEST_CASE("missing, misshapen, superfluous and non-finite tensors") {
  const scratch_folder folder;
  const nlohmann::json config = small_config();
  std::vector<std::string> notes;
  const auto error = [&](const nlohmann::json& c, const float_tensors& tensors) {
    write_model(folder.path(), c, tensors);
    return message_of([&] { model::load(folder.path(), &notes); });
  };
  const float_tensors good = small_weights(config);
  const std::string v = "model.layers.1.self_attn.v_proj.weight";
  CHECK(error(config, good) == "");
  CHECK(notes.empty());
  float_tensors missing = good, misshapen = good, infinite = good, extra = good, bare;
  missing.erase(v);
  CHECK(mentions(error(config, missing), "'" + v + "' is missing"));
  missing.erase("model.embed_tokens.weight");
  CHECK(mentions(error(config, missing), "embed_tokens"));
  misshapen[v].shape = {8, 32};
  CHECK(mentions(error(config, misshapen), "shape [8, 32], expected [16, 16]"));
  infinite[v].values[5] = std::numeric_limits<float>::quiet_NaN();
  CHECK(mentions(error(config, infinite), v + "': value 5 is nan"));
  extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = {{4}, {1, 1, 1, 1}};
  CHECK(error(config, extra) == "");
  REQUIRE(notes.size() == 1);
  CHECK(mentions(notes[0], "1 tensors of the checkpoint are not used"));
  CHECK(mentions(error(config, small_weights(config, true)), "q_proj.bias' is there, but"));
  for (const auto& [name, tensor] : good) bare[name.substr(name.find('.') + 1)] = tensor;
  CHECK(error(config, bare) == "");
}

TEST_CASE("attention_bias and mlp_bias take their biases from the file") {
  const scratch_folder folder;
  nlohmann::json config = small_config();
  config["attention_bias"] = true;
  float_tensors tensors = small_weights(config, true);
  write_model(folder.path(), config, tensors);
  CHECK(mentions(message_of([&] { model::load(folder.path()); }), "o_proj.bias' is missing"));
  for (const std::string layer : {"0", "1"}) {
    tensors["model.layers." + layer + ".self_attn.o_proj.bias"] = {{16},
                                                                   std::vector<float>(16, 0.5f)};
  }
  write_model(folder.path(), config, tensors);
  const whole_pass biased(model::load(folder.path()), some_tokens);
  config["attention_bias"] = false;
  write_model(folder.path(), config, small_weights(config));
  const whole_pass plain(model::load(folder.path()), some_tokens);
  CHECK(biased.k[0] != plain.k[0]);
  config["mlp_bias"] = true;
  write_model(folder.path(), config, small_weights(config));
  CHECK(mentions(message_of([&] { model::load(folder.path()); }), "gate_proj.bias' is missing"));
}

TEST_CASE("keys at position 20000 follow the closed form, scaling included") {
  const scratch_folder folder;
  nlohmann::json config = small_config();
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 32.0},
                            {"low_freq_factor", 1.0},
                            {"high_freq_factor", 4.0},
                            {"original_max_position_embeddings", 8192}};
  write_model(folder.path(), config, small_weights(config));
  const model m = model::load(folder.path());
  const whole_pass at_zero(m, {7}, 0), far(m, {7}, 20000);
  for (int h = 0; h < 2; ++h) {
    for (int i = 0; i < 4; ++i) {
      double frequency = std::exp(-std::log(500000.0) * i / 4);
      const double wavelength = 2 * std::numbers::pi / frequency;
      if (wavelength > 8192) {
        frequency /= 32;
      } else if (wavelength > 2048) {
        const double smooth = (8192 / wavelength - 1) / 3;
        frequency = (1 - smooth) * frequency / 32 + smooth * frequency;
      }
      const double c = std::cos(20000 * frequency), s = std::sin(20000 * frequency);
      const auto j = static_cast<size_t>(h * 8 + i);
      const double a = at_zero.k[0][j], b = at_zero.k[0][j + 4];
      CHECK(far.k[0][j] == doctest::Approx(a * c - b * s).epsilon(1e-5));
      CHECK(far.k[0][j + 4] == doctest::Approx(b * c + a * s).epsilon(1e-5));
    }
  }
}

TEST_CASE("fingerprints tell models apart and not their packaging") {
  const scratch_folder folder;
  nlohmann::json config = small_config();
  float_tensors tensors = small_weights(config);
  const auto fingerprint = [&] {
    write_model(folder.path(), config, tensors);
    return model::load(folder.path()).fingerprint();
  };
  const std::string first = fingerprint();
  CHECK(first.size() == 16);
  config["torch_dtype"] = "bfloat16";
  tensors["unused"] = {{1}, {1}};
  CHECK(fingerprint() == first);
  config["rope_theta"] = 10000.0;
  const std::string second = fingerprint();
  CHECK(second != first);
  tensors["model.layers.1.mlp.down_proj.weight"].values[0] += 1;
  CHECK(fingerprint() != second);
}

TEST_CASE("rows of forward do not depend on the rows beside them") {
  const model m = model::load(model_directory("qwen2"));
  std::vector<std::int32_t> tokens(40);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int32_t>(i * 17 % 61);
  std::vector<std::int64_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), 5);
  const auto own_value = [](attention_block& block) {
    for (size_t i = 0; i < block.o.size(); ++i) block.o[i] = block.q[i] + block.v[i % 8];
  };
  const auto by_row = [&](size_t first, size_t rows) {
    const auto p = std::span(positions).subspan(first, rows);
    const auto only_q = [](attention_block& block) {
      std::copy(block.q.begin(), block.q.end(), block.o.begin());
    };
    return m.forward(std::span(tokens).subspan(first, rows), p, only_q);
  };
  const auto whole = by_row(0, 40);
  for (const size_t first : {0, 3, 16, 39}) {
    const auto alone = by_row(first, 1);
    CHECK(std::memcmp(alone.data(), whole.data() + first * 56, 56 * sizeof(float)) == 0);
  }
  CHECK(m.forward(tokens, positions, own_value).size() == whole.size());
}

TEST_CASE("tokens and positions outside the model are refused") {
  const model m = model::load(model_directory("llama"));
  const auto run = [&](std::int32_t token, std::int64_t position) {
    const std::vector<std::int32_t> tokens = {token};
    const std::vector<std::int64_t> positions = {position};
    return message_of([&] { m.forward(tokens, positions, [](attention_block&) {}); });
  };
  CHECK(run(60, 4095) == "");
  CHECK(mentions(run(61, 0), "token id 61 at position 0, expected 0 .. 60"));
  CHECK(mentions(run(-1, 0), "token id -1"));
  CHECK(mentions(run(0, 4096), "position 4096"));
}

TEST_CASE("GPT-2 with and without the prefix, and past its position limit") {
  const model m = model::load(model_directory("gpt2"));
  const scratch_folder folder;
  write_file(folder.file("config.json"), read_file(model_directory("gpt2") + "/config.json"));
  // The same file with every name behind "transformer.".
  const std::string bytes = read_file(model_directory("gpt2") + "/model.safetensors");
  std::uint64_t size = 0;
  std::memcpy(&size, bytes.data(), 8);
  const auto header = nlohmann::json::parse(bytes.substr(8, size));
  nlohmann::json renamed = nlohmann::json::object();
  for (const auto& [name, value] : header.items()) {
    renamed[name == "__metadata__" ? name : "transformer." + name] = value;
  }
  write_file(folder.file("model.safetensors"),
             safetensors_bytes(renamed.dump(), bytes.substr(8 + size)));
  const model prefixed = model::load(folder.path());
  CHECK(whole_pass(prefixed, some_tokens).logits == whole_pass(m, some_tokens).logits);
  const auto at = [&](std::int64_t position) {
    const std::vector<std::int32_t> tokens = {1};
    const std::vector<std::int64_t> positions = {position};
    return message_of([&] { m.forward(tokens, positions, [](attention_block&) {}); });
  };
  CHECK(at(127) == "");
  CHECK(mentions(at(128), "position 128, the model knows 0 .. 127"));
}

TEST_CASE("output projection by head and value norms") {
  const model m = model::load(model_directory("llama"));
  const auto wo = m.wo(1);  // [6, 8, 48]
  std::vector<float> v(3 * 2 * 8);
  for (size_t i = 0; i < v.size(); ++i) v[i] = std::sin(static_cast<float>(i));
  std::vector<float> norms;
  m.value_norm(1, v, 3, norms);
  REQUIRE(norms.size() == 18);
  for (size_t r = 0; r < 3; ++r) {
    for (size_t h = 0; h < 6; ++h) {
      double norm = 0;
      for (size_t j = 0; j < 48; ++j) {
        double sum = 0;
        for (size_t c = 0; c < 8; ++c) {
          sum += static_cast<double>(v[r * 16 + h / 3 * 8 + c]) * wo[(h * 8 + c) * 48 + j];
        }
        norm += std::abs(sum);
      }
      CHECK(norms[r * 6 + h] == doctest::Approx(norm).epsilon(1e-5));
    }
  }
}

}  // namespace
}  // namespace kvreplay::tracer
