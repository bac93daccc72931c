// synth: traces without a model. Seeded, self-consistent (o and lse follow from q, k, v), with the
// structure that policies react to: an attention sink, heavy hitters, drift, locality.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "traces/schema.hpp"

namespace kvreplay::traces {

struct synth_options {
  int layers = 4, q_heads = 6, kv_heads = 3, head_dim = 16, value_dim = 0;  // 0 = head_dim
  int hidden_size = 0;  // 0 = q_heads * head_dim
  int vocab_size = 50, logit_size = 64;
  std::int64_t prompt_length = 96, tokens = 192;
  int sequences = 1;
  std::uint64_t seed = 0;
  double sink = 3;            // strength of the sink at position 0, in nats
  double heavy_share = 0.05;  // share of positions that keep drawing attention
  double heavy = 2;           // their strength, in nats
  double drift = 0.02;        // how fast the query direction moves per step
  double locality = 0.02;     // nats lost per position of distance
  std::vector<int> window;    // [layers] or empty
  bool learned_sinks = false;
  bool value_norm = false, retention = false, residual = false, wo = false, logits = true;
  bool attention = false;  // probability rows of every decode step
};

// Writes the trace at `path`. Throws trace_error.
void synth(const std::string& path, const synth_options& options);

}  // namespace kvreplay::traces
