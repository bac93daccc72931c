// All weights of a model as floats, in the shapes that the forward pass multiplies with.
#pragma once

#include <string>
#include <vector>

#include "tracer/config.hpp"
#include "tracer/linear.hpp"

namespace kvreplay::tracer {

// weight [outputs, inputs]; bias empty or [outputs].
struct dense_weights {
  int outputs = 0, inputs = 0;
  std::vector<float> weight, bias;
  linear_view view() const {
    return {outputs, inputs, weight.data(), bias.empty() ? nullptr : bias.data(), 0};
  }
};

// A norm over `weight.size()` channels; bias: layer norms only, else empty. The factor is as it is
// multiplied with: 1 has been added where the files leave it out.
struct norm_weights {
  std::vector<float> weight, bias;
};

struct layer_weights {
  norm_weights attention_norm, mlp_norm;            // [hidden_size]
  norm_weights q_norm, k_norm;                      // [head_dim] or empty
  norm_weights post_attention_norm, post_mlp_norm;  // [hidden_size] or empty
  dense_weights qkv;                                // rows: q heads, k heads, v heads
  dense_weights o;
  dense_weights gate_up;  // rows: gate, up; without a gate: up
  dense_weights down;
};

struct model_weights {
  std::vector<float> embedding;  // [logit_size, hidden_size]
  std::vector<float> positions;  // [max_position_embeddings, hidden_size] or empty
  std::vector<float> head;       // as embedding, or empty: the embedding serves
  norm_weights final_norm;
  std::vector<layer_weights> layers;
  std::string fingerprint;  // 16 hex digits
};

// Reads every tensor that `config` asks for. Throws model_error for a missing tensor, a wrong
// shape, a value that is not finite, or a bias that the file has and the config denies. What the
// file has beyond that is named in `notes`.
model_weights load_weights(const std::string& directory, const model_config& config,
                           std::vector<std::string>* notes);

}  // namespace kvreplay::tracer
