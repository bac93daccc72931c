// record: a real run of a model into a trace.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tracer/model.hpp"
#include "tracer/tokens.hpp"

namespace kvreplay::tracer {

struct record_options {
  std::vector<std::int32_t> tokens;
  std::optional<std::int64_t> prompt_length;  // required without `generate`
  std::optional<std::int64_t> generate;       // all tokens are the prompt, T = P + generate
  double temperature = 0;                     // 0: greedy
  std::uint64_t seed = 0;
  bool kv_fp32 = false;      // --kv-dtype fp32: compute with unrounded q, k, v
  bool full_logits = false;  // --logits full
  int attention_every = 0;   // 0 none, 1 full, k: every k-th decode row
  std::vector<int> layers;   // empty: all
  bool with_wo = false, with_value_norm = false, with_residual = false;
  bool rows_decode = false;  // --rows decode: q, o, lse from P-64 on, plus column_sum
  int block = 128;
  int flush_every = 16;   // positions between commits of a step-wise recording
  bool stepwise = false;  // teacher-forced, but one position at a time (checks)
  std::string task;
  std::string producer;
};

struct record_progress {
  std::int64_t done = 0, total = 0;  // positions
};

struct record_summary {
  std::int64_t positions = 0, bytes = 0;
  double seconds = 0;
  std::vector<std::int32_t> generated;
};

// Size of the file this recording will have.
std::int64_t projected_bytes(const model_config& config, const record_options& options);

// Writes `path`. Refuses (model_error / traces::trace_error) token ids outside the vocabulary, a
// prompt length outside 1 .. T-1, positions beyond the model's limit, a value beyond float16, and a
// disk without room for the projected size. `progress` may be empty.
record_summary record(const model& m, const std::string& path, const record_options& options,
                      const std::function<void(const record_progress&)>& progress);

}  // namespace kvreplay::tracer
