// What a kvtrace file says about itself: plain structs shared by reader, writer and synth.
// The format is traces/FORMAT.md.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvreplay::traces {

using half_bits = std::uint16_t;  // IEEE binary16, raw

inline constexpr std::uint32_t format_version = 1;

// Every complaint about a file: what() is one line that names the file, the dataset or attribute,
// the layer or step where there is one, what was found and what was expected.
class trace_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct model_info {
  std::string name, architecture;
  int n_layers = 0, n_q_heads = 0, n_kv_heads = 0, head_dim = 0, value_dim = 0;
  int hidden_size = 0, vocab_size = 0, logit_size = 0;
  double softmax_scale = 1;
  std::string rope = "none";             // none | half | interleaved
  int rope_dim = 0;                      // rotated channels; = head_dim when the file does not say
  std::string key_rotation = "rotated";  // rotated | raw
  double score_softcap = 0;
  std::string compute_dtype, cache_dtype, model_fingerprint;  // empty: not said
  std::vector<int> layers;            // recorded layers, ascending (filled also where absent)
  std::vector<int> window;            // [n_layers], 0 = global (filled also where absent)
  std::vector<float> sinks;           // [n_layers, n_q_heads] or empty
  std::vector<double> rope_inv_freq;  // [rope_inv_freq_rows, rope_dim / 2] or empty
  int rope_inv_freq_rows = 0;         // 1 or n_layers
  std::vector<int> wo_layers;         // layers that have wo/<layer>

  bool records_all_layers() const { return static_cast<int>(layers.size()) == n_layers; }
  int group() const { return n_q_heads / n_kv_heads; }
};

// What one sequence holds. In a file opened with recover, n_tokens is already cut to `committed`.
struct sequence_info {
  int id = 0;
  std::int64_t n_prompt = 0, n_tokens = 0, committed = 0;
  std::string name, task, source, fingerprint;
  std::optional<double> temperature;
  std::optional<std::int64_t> seed;
  std::vector<std::int32_t> logit_pos;  // [R]
  bool has_logits = false, has_confidence = false, has_residual_final = false;
  bool logits_float16 = false;  // else float32
  std::vector<std::pair<int, int>> chunks;
  std::map<std::string, std::vector<std::pair<int, int>>> spans;
  std::int64_t n_decode() const { return n_tokens - n_prompt; }
};

// Which datasets a layer has beside k and v.
struct layer_info {
  std::int64_t first_row = 0;  // q, o, lse hold positions first_row .. T-1
  bool has_q = false, has_k = false, has_v = false, has_o = false, has_lse = false;
  bool has_column_sum = false, has_attn = false, has_value_norm = false;
  bool has_residual_norm = false, has_image_score = false, has_retention = false;
};

}  // namespace kvreplay::traces
