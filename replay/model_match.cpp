#include "replay/model_match.hpp"

#include <fmt/format.h>

#include <utility>

namespace kvreplay::replay {

void require_same_model(const traces::reader& trace, int sequence, const tracer::model& model) {
  const auto& have = trace.model();
  const auto& config = model.config();
  const std::pair<const char*, std::pair<int, int>> sizes[] = {
      {"layers", {have.n_layers, config.n_layers}},
      {"query heads", {have.n_q_heads, config.n_q_heads}},
      {"KV heads", {have.n_kv_heads, config.n_kv_heads}},
      {"head_dim", {have.head_dim, config.head_dim}},
      {"value_dim", {have.value_dim, config.head_dim}},
      {"hidden_size", {have.hidden_size, config.hidden_size}},
      {"vocab_size", {have.vocab_size, config.vocab_size}}};
  const auto differs = [&](const std::string& what) {
    return traces::trace_error(fmt::format("{}: recorded with another model than {}: {}",
                                           trace.path(), config.name, what));
  };
  for (const auto& [name, size] : sizes) {
    if (size.first == size.second) continue;
    throw differs(fmt::format("{} {}, expected {}", name, size.first, size.second));
  }
  for (size_t layer = 0; layer < config.window.size(); ++layer) {
    if (have.window[layer] == config.window[layer]) continue;
    throw differs(fmt::format("window {} in layer {}, expected {}", have.window[layer], layer,
                              config.window[layer]));
  }
  if (!have.sinks.empty()) throw differs("it has learned sinks, the model none");
  if (!have.model_fingerprint.empty() && have.model_fingerprint != model.fingerprint()) {
    throw differs(
        fmt::format("fingerprint {}, expected {}", have.model_fingerprint, model.fingerprint()));
  }
  const auto& info = trace.sequence(sequence);
  if (info.n_tokens > config.max_position_embeddings) {
    throw differs(fmt::format("sequence {} has {} positions, the model knows {}", sequence,
                              info.n_tokens, config.max_position_embeddings));
  }
}

}  // namespace kvreplay::replay
