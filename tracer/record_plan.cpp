#include "tracer/record_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace kvreplay::tracer {
namespace {

constexpr std::int64_t observation_rows =
    64;  // query rows before the decode that `rows_decode` keeps

void check_tokens(const model_config& config, const record_options& options) {
  for (size_t i = 0; i < options.tokens.size(); ++i) {
    const std::int32_t id = options.tokens[i];
    if (id < 0 || id >= config.vocab_size) {
      throw model_error(
          fmt::format("token {} of the input is {}, expected 0 .. {} ({} real ids of {})", i, id,
                      config.vocab_size - 1, config.vocab_size, config.name));
    }
  }
}

void check_numbers(const record_options& options) {
  const auto at_least = [](const char* name, std::int64_t value, std::int64_t low) {
    if (value < low) {
      throw model_error(fmt::format("{} is {}, expected at least {}", name, value, low));
    }
  };
  at_least("block", options.block, 1);
  at_least("flush_every", options.flush_every, 1);
  at_least("attention_every", options.attention_every, 0);
  if (options.generate) at_least("generate", *options.generate, 1);
  if (!std::isfinite(options.temperature) || options.temperature < 0) {
    throw model_error(
        fmt::format("temperature is {}, expected a number from 0", options.temperature));
  }
}

struct lengths {
  std::int64_t prompt = 0, total = 0;
};

lengths plan_lengths(const model_config& config, const record_options& options) {
  const auto given = static_cast<std::int64_t>(options.tokens.size());
  if (given == 0) throw model_error("no token ids to record");
  lengths out{given, given};
  if (options.generate) {
    if (options.prompt_length && *options.prompt_length != given) {
      throw model_error(
          fmt::format("prompt length {} with generate, where all {} tokens are the prompt",
                      *options.prompt_length, given));
    }
    if (*options.generate > config.max_position_embeddings)
      out.total = INT64_MAX;
    else
      out.total = given + *options.generate;
  } else {
    if (options.temperature != 0) throw model_error("a temperature needs generate");
    if (!options.prompt_length) throw model_error("a prompt length is required without generate");
    out.prompt = *options.prompt_length;
    if (out.prompt < 1 || out.prompt > given - 1) {
      throw model_error(fmt::format("prompt length is {}, expected 1 .. {} ({} tokens)", out.prompt,
                                    given - 1, given));
    }
  }
  if (out.total > config.max_position_embeddings) {
    throw model_error(
        fmt::format("{} positions, but {} knows {} (max_position_embeddings)",
                    out.total == INT64_MAX ? "too many" : fmt::format("{}", out.total), config.name,
                    config.max_position_embeddings));
  }
  return out;
}

std::vector<int> plan_layers(const model_config& config, const record_options& options) {
  std::vector<int> layers = options.layers;
  if (layers.empty()) {
    layers.resize(static_cast<size_t>(config.n_layers));
    std::iota(layers.begin(), layers.end(), 0);
  }
  std::sort(layers.begin(), layers.end());
  if (std::adjacent_find(layers.begin(), layers.end()) != layers.end()) {
    throw model_error("a layer is named twice");
  }
  if (layers.front() < 0 || layers.back() >= config.n_layers) {
    throw model_error(fmt::format("layer {}, expected 0 .. {}",
                                  layers.front() < 0 ? layers.front() : layers.back(),
                                  config.n_layers - 1));
  }
  return layers;
}

traces::model_info describe_model(const model_config& config, const record_options& options) {
  traces::model_info out;
  out.name = config.name;
  out.architecture = config.architecture;
  out.n_layers = config.n_layers;
  out.n_q_heads = config.n_q_heads;
  out.n_kv_heads = config.n_kv_heads;
  out.head_dim = out.value_dim = config.head_dim;
  out.hidden_size = config.hidden_size;
  out.vocab_size = config.vocab_size;
  out.logit_size = config.logit_size;
  out.softmax_scale = config.softmax_scale;
  out.rope = config.rope.dim > 0 ? "half" : "none";
  out.rope_dim = config.rope.dim;
  out.key_rotation = "rotated";
  out.compute_dtype = "float32";
  out.cache_dtype = options.kv_fp32 ? "float32" : "float16";
  out.layers = plan_layers(config, options);
  out.window = config.window;
  if (config.rope.dim > 0) {
    out.rope_inv_freq_rows = config.local_rope ? config.n_layers : 1;
    for (int layer = 0; layer < out.rope_inv_freq_rows; ++layer) {
      const auto row = inverse_frequencies(rope_of(config, layer));
      out.rope_inv_freq.insert(out.rope_inv_freq.end(), row.begin(), row.end());
    }
  }
  if (options.with_wo) out.wo_layers = out.layers;
  return out;
}

}  // namespace

record_plan plan_recording(const model_config& config, const record_options& options) {
  check_numbers(options);
  check_tokens(config, options);
  const lengths size = plan_lengths(config, options);
  record_plan out;
  out.model = describe_model(config, options);
  traces::sequence_plan& sequence = out.sequence;
  sequence.n_prompt = size.prompt;
  sequence.n_tokens = size.total;
  sequence.task = options.task;
  sequence.source = "real";
  if (options.generate) {
    sequence.temperature = options.temperature;
    sequence.seed = static_cast<std::int64_t>(options.seed);
  }
  if (options.rows_decode) {
    sequence.first_row = std::max<std::int64_t>(0, size.prompt - observation_rows);
    sequence.column_sum = true;
  }
  for (std::int64_t t = size.prompt - 1; t < size.total; ++t) {
    sequence.logit_pos.push_back(static_cast<std::int32_t>(t));
  }
  if (options.attention_every > 0) {
    for (std::int64_t t = size.prompt; t < size.total; t += options.attention_every) {
      sequence.attn_pos.push_back(static_cast<std::int32_t>(t));
    }
  }
  sequence.confidence = true;
  sequence.logits = options.full_logits;
  sequence.residual_final = sequence.residual_norm = options.with_residual;
  sequence.value_norm = options.with_value_norm;
  sequence.o_float16 = !options.kv_fp32;
  return out;
}

std::int64_t projected_bytes(const model_config& config, const record_options& options) {
  const record_plan plan = plan_recording(config, options);
  return traces::projected_bytes(plan.model, plan.sequence);
}

void require_space(const std::string& path, std::int64_t projected, std::uint64_t available) {
  const std::int64_t needed = projected + projected / 20;
  if (static_cast<std::uint64_t>(needed) > available) {
    throw model_error(fmt::format("{}: the recording needs about {} bytes and the disk has {} left",
                                  path, needed, available));
  }
}

}  // namespace kvreplay::tracer
