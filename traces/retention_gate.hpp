// retention_gate: a learned retention in a trace, and the gate that gave it (FORMAT.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "traces/schema.hpp"

namespace kvreplay::traces {

// ln beta = ln sigmoid(z), z = output_weight . tanh(hidden_weight x + hidden_bias) + output_bias,
// x = ((k, v) - input_mean) * input_scale, per recorded layer and KV head.
struct retention_gate {
  int layers = 0, kv_heads = 0, head_dim = 0, value_dim = 0, hidden = 0;
  int outputs = 1;  // output projections: 1, layers, or layers * kv_heads
  std::vector<float> input_mean, input_scale;  // [layers, kv_heads, head_dim + value_dim]
  std::vector<float> hidden_weight;            // [layers, kv_heads, hidden, head_dim + value_dim]
  std::vector<float> hidden_bias;              // [layers, kv_heads, hidden]
  std::vector<float> output_weight;            // [outputs, hidden]
  std::vector<float> output_bias;              // [outputs]

  int output_of(int layer, int kv_head) const {
    return outputs == 1 ? 0 : outputs == layers ? layer : layer * kv_heads + kv_head;
  }
};

// ln beta of one entry; `layer` counts the recorded layers. k [head_dim], v [value_dim].
float log_retention(const retention_gate& gate, int layer, int kv_head, const float* k,
                    const float* v);

// `from` copied to `to`, with `retention` (rows[sequence][recorded layer]: [n_tokens, kv_heads])
// and the gate in place of any it had. An existing `to` stays until the copy is whole.
void copy_with_retention(const std::string& from, const std::string& to,
                         const std::vector<std::vector<std::vector<float>>>& rows,
                         const retention_gate& gate);

// The gate of a trace; empty where it has none, or one that is not of this form. Throws trace_error
// where shapes contradict each other or the model, or a weight is not finite.
std::optional<retention_gate> read_retention_gate(const std::string& path, const model_info& model);

}  // namespace kvreplay::traces
