#include <fmt/format.h>

#include <charconv>
#include <filesystem>

#include "replay/commands.hpp"
#include "replay/text.hpp"
#include "traces/synth.hpp"

namespace kvreplay::replay {
namespace {

// "8/2" -> query heads, KV heads
void read_heads(const std::string& text, traces::synth_options& options) {
  const auto bad = [&] {
    return usage_error(fmt::format(
        "--heads {}: expected query heads / KV heads, e.g. 8/2, the first a multiple of the second",
        text));
  };
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, options.q_heads);
  if (first.ec != std::errc() || first.ptr == end || *first.ptr != '/') throw bad();
  const auto second = std::from_chars(first.ptr + 1, end, options.kv_heads);
  if (second.ec != std::errc() || second.ptr != end) throw bad();
  if (options.q_heads < 1 || options.kv_heads < 1 || options.q_heads % options.kv_heads != 0)
    throw bad();
}

}  // namespace

int run_synth(const common_options&, synth_command command) {
  auto& o = command.options;
  read_heads(command.heads, o);
  if (o.prompt_length > o.tokens) {
    throw usage_error(
        fmt::format("--prompt-length {} is more than --tokens {}", o.prompt_length, o.tokens));
  }
  if (!o.window.empty() && std::ssize(o.window) != o.layers) {
    throw usage_error(
        fmt::format("--window names {} layers, --layers {}", o.window.size(), o.layers));
  }
  for (const auto& with : command.with) {
    o.learned_sinks = o.learned_sinks || with == "sinks";
    o.value_norm = o.value_norm || with == "value_norm";
    o.retention = o.retention || with == "retention";
    o.residual = o.residual || with == "residual";
    o.wo = o.wo || with == "wo" || with == "value_norm" || with == "residual";
    o.attention = o.attention || with == "attention";
  }
  traces::synth(command.output, o);
  fmt::print("{}: {} sequence{} of {} positions, {} layers, {}\n", command.output, o.sequences,
             o.sequences == 1 ? "" : "s", o.tokens, o.layers,
             bytes_text(static_cast<double>(std::filesystem::file_size(command.output))));
  return exit_ok;
}

}  // namespace kvreplay::replay
