// A decoder-only transformer on the CPU in FP32, run over blocks of rows with the attention of each
// layer supplied by the caller (DESIGN, "One idea"): recording and the closed loop both drive it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tracer/config.hpp"

namespace kvreplay::tracer {

// One layer's rows on their way through attention. q and k are rotated; biases and norms applied.
struct attention_block {
  int layer = 0;
  std::int64_t rows = 0;
  std::span<const std::int64_t> positions;  // [rows]
  std::span<float> q;  // [rows, n_q_heads, head_dim]; the caller may round it in place
  std::span<float> k;  // [rows, n_kv_heads, head_dim]
  std::span<float> v;  // [rows, n_kv_heads, head_dim]
  std::span<float> o;  // [rows, n_q_heads, head_dim]: to be filled by the caller
};
using attention_fn = std::function<void(attention_block&)>;

// Called after each layer with the residual stream, [rows, hidden_size]; may be empty.
using residual_fn = std::function<void(int layer, std::span<const float> residual)>;

class model {
 public:
  // Loads a Hugging Face directory (config.json, safetensors single or sharded). Notes (extra
  // tensors ignored, tied head differs) go to `notes`, one line each. Throws model_error with a
  // line naming file and tensor.
  static model load(const std::string& directory, std::vector<std::string>* notes = nullptr);
  model(model&&) noexcept;
  model& operator=(model&&) noexcept;
  ~model();

  const model_config& config() const;
  std::string fingerprint() const;  // hash over config, tensor names, shapes, first bytes; 16 hex

  // Runs rows (any mix of sequences and lanes: what a row attends to is the caller's business)
  // through all layers. Returns the residual stream before the final norm, [rows, hidden_size].
  // Bits of a row depend on that row alone: not on the number or content of other rows, nor on
  // threads (products are padded to at least 16 rows and cut in fixed tiles).
  std::vector<float> forward(std::span<const std::int32_t> tokens,
                             std::span<const std::int64_t> positions, const attention_fn& attend,
                             const residual_fn& after_layer = {}) const;

  // Final norm and output head: residual [rows, hidden_size] -> logits [rows, vocab rows of head].
  void logits(std::span<const float> residual, std::int64_t rows, std::vector<float>& out) const;

  // What a layer's attention output adds to the residual stream: output projection, bias and norm
  // (where the model has them). o [rows, n_q_heads, head_dim] -> [rows, hidden_size].
  std::vector<float> attention_update(int layer, std::span<const float> o, std::int64_t rows) const;
  // Output projection of a layer as [n_q_heads, head_dim, hidden_size].
  std::vector<float> wo(int layer) const;
  // L1 norm of each row's value through each query head's slice of the output projection:
  // v [rows, n_kv_heads, head_dim] -> out [rows, n_q_heads].
  void value_norm(int layer, std::span<const float> v, std::int64_t rows,
                  std::vector<float>& out) const;
  // The inverse frequencies in use, [rope_dim / 2], any scaling applied.
  std::vector<double> rope_inv_freq(int layer) const;

 private:
  struct impl;
  explicit model(std::unique_ptr<impl> p);
  std::unique_ptr<impl> impl_;
};

}  // namespace kvreplay::tracer
