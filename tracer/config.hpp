// config.json of a Hugging Face directory as one plain struct, in the spellings of transformers 4
// and 5 (rope_theta / rope_scaling and rope_parameters, torch_dtype and dtype).
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvreplay::tracer {

// A model directory that cannot be used: one line naming file and key or tensor, found, expected.
class model_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct rope_config {
  double theta = 10000;
  std::string scaling = "default";  // default | linear | llama3
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  double original_max_position_embeddings = 0;
  int dim = 0;  // rotated channels; 0: nothing turns
};

enum class activation_kind { silu, gelu_tanh };

struct model_config {
  std::string architecture;  // model_type: "llama", "qwen2" ...
  std::string name;          // the directory's name
  int n_layers = 0, n_q_heads = 0, n_kv_heads = 0, head_dim = 0;
  int hidden_size = 0, intermediate_size = 0, max_position_embeddings = 0;
  int logit_size = 0;  // rows of embedding and output head: vocab_size of config.json
  int vocab_size = 0;  // real ids: what tokenizer.json knows where it lies beside, else logit_size
  double norm_eps = 1e-6;
  double softmax_scale = 1;  // of attention scores
  bool tied_embeddings = false, qkv_bias = false, o_bias = false, mlp_bias = false;
  activation_kind activation = activation_kind::silu;
  bool gated_mlp = true;           // act(gate) * up, else act(up)
  bool qk_norm = false;            // RMS norms over the channels of each q and k head
  bool post_norms = false;         // norms of what attention and MLP add to the residual stream
  bool norms_add_one = false;      // the files hold w of a factor 1 + w
  bool layer_norms = false;        // with means and biases, else RMS norms
  bool learned_positions = false;  // a table of max_position_embeddings rows
  double embedding_scale = 1;
  double final_softcap = 0;  // logits become cap tanh(logits / cap); 0: they stay
  rope_config rope;
  std::optional<rope_config> local_rope;  // of layers with a window, where theirs differs
  std::vector<int> window;                // [n_layers], 0 = global
  std::string stored_dtype;               // torch_dtype / dtype, as a note
};

// Throws model_error for unknown architectures, activations and RoPE scalings, and for whatever
// else would change the numbers and is not done here.
model_config read_config(const std::string& directory);

// The rotation of a layer.
const rope_config& rope_of(const model_config& config, int layer);

// Inverse frequencies, [dim / 2]; scaling as in transformers' modeling_rope_utils.
std::vector<double> inverse_frequencies(const rope_config& rope);

}  // namespace kvreplay::tracer
