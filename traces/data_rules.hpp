// The rules about values (FORMAT.md, "What strict refuses"), shared by the reader, which throws at
// the first fault, and by check, which collects them. Internal to traces/.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "traces/reader.hpp"

namespace kvreplay::traces {

struct data_fault {
  std::string text;            // one line: dataset, step, found, expected
  std::int64_t nonfinite = 0;  // values in that row that are NaN or infinite
};

using fault_sink = std::function<void(const data_fault&)>;

// `where` is "file: sequences/<s>/layers/<l>". At most one fault per row and dataset.
void check_slice(const layer_slice& slice, const model_info& model, const std::string& where,
                 const fault_sink& sink);

// [n, 4] rows of `confidence`; positions gives the step of each.
void check_confidence(std::span<const float> rows, std::span<const std::int32_t> positions,
                      const std::string& where, const fault_sink& sink);

// [n, logit_size]: NaN and +inf are faults, and so is a row of -inf alone.
void check_logits(std::span<const float> rows, std::span<const std::int32_t> positions,
                  const model_info& model, const std::string& where, const fault_sink& sink);

// [n, width] rows that must be finite.
void check_finite(std::span<const float> rows, std::int64_t width,
                  std::span<const std::int32_t> positions, const std::string& where,
                  const fault_sink& sink);

// One probability row [n_q_heads, n_tokens]: entries in [0, 1], zero past `position`, sum 1 within
// n * 2^-25 + 2^-11 (with learned sinks: above 0 and at most 1).
void check_attention(std::span<const half_bits> row, std::int64_t n_tokens, std::int64_t position,
                     bool sinks, const std::string& where, const fault_sink& sink);

double attention_tolerance(std::int64_t visible);

}  // namespace kvreplay::traces
