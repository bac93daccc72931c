#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <vector>

#include "replay/commands.hpp"
#include "replay/progress.hpp"
#include "replay/text.hpp"
#include "traces/check.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

std::string list_text(const std::vector<int>& values) {
  return fmt::format("{}", fmt::join(values, " "));
}

void print_model(const traces::model_info& m) {
  fmt::print("model      {} ({}), {} layers, {} query heads on {} KV heads, head_dim {}{}\n",
             m.name, m.architecture, m.n_layers, m.n_q_heads, m.n_kv_heads, m.head_dim,
             m.value_dim == m.head_dim ? "" : fmt::format(", value_dim {}", m.value_dim));
  fmt::print(
      "           vocabulary {}{}, hidden {}, softmax scale {:.6g}, rope {}{}, keys {}\n",
      m.vocab_size,
      m.logit_size == m.vocab_size ? "" : fmt::format(" (padded to {})", m.logit_size),
      m.hidden_size, m.softmax_scale, m.rope,
      m.rope == "none" || m.rope_dim == m.head_dim ? "" : fmt::format(" ({} channels)", m.rope_dim),
      m.key_rotation);
  fmt::print("           cache {}, computed in {}, fingerprint {}\n",
             m.cache_dtype.empty() ? "unknown" : m.cache_dtype,
             m.compute_dtype.empty() ? "unknown" : m.compute_dtype,
             m.model_fingerprint.empty() ? "none" : m.model_fingerprint);
  fmt::print("layers     {} of {} recorded: {}\n", m.layers.size(), m.n_layers,
             list_text(m.layers));
  if (std::any_of(m.window.begin(), m.window.end(), [](int w) { return w > 0; })) {
    fmt::print("windows    {} (0 = global)\n", list_text(m.window));
  }
  if (!m.sinks.empty()) fmt::print("sinks      learned, one logit per query head\n");
}

std::string layer_datasets(const traces::layer_info& l) {
  std::string out;
  const auto add = [&](bool there, const char* name) {
    if (there) out += fmt::format("{}{}", out.empty() ? "" : " ", name);
  };
  add(l.has_q, "q");
  add(l.has_k, "k");
  add(l.has_v, "v");
  add(l.has_o, "o");
  add(l.has_lse, "lse");
  add(l.has_column_sum, "column_sum");
  add(l.has_attn, "attn");
  add(l.has_value_norm, "value_norm");
  add(l.has_residual_norm, "residual_norm");
  add(l.has_image_score, "image_score");
  add(l.has_retention, "retention");
  if (l.first_row > 0) out += fmt::format(" (q, o, lse from position {})", l.first_row);
  return out;
}

void print_sequence(const traces::reader& trace, const traces::sequence_info& s) {
  fmt::print("sequence {} {}: prompt {}, {} positions, {} logit rows ({}{}{}){}\n", s.id,
             s.name.empty() ? "" : fmt::format("'{}'", s.name), s.n_prompt, s.n_tokens,
             s.logit_pos.size(), s.has_confidence ? "confidence" : "",
             s.has_logits ? " logits" : "", s.has_residual_final ? " residual_final" : "",
             s.source.empty() ? "" : ", " + s.source);
  if (s.temperature) fmt::print("           temperature {:g}\n", *s.temperature);
  for (const auto& [name, ranges] : s.spans) {
    fmt::print("           span {}: {} range{}\n", name, ranges.size(),
               ranges.size() == 1 ? "" : "s");
  }
  const auto& layers = trace.model().layers;
  if (!layers.empty()) {
    fmt::print("           each layer: {}\n", layer_datasets(trace.layer(s.id, layers.front())));
  }
  fmt::print("           fingerprint {}\n", trace.fingerprint(s.id));
}

int check_trace(const traces::reader& trace, const common_options& common, bool all) {
  traces::check_options options;
  options.all = all;
  traces::check_report report;
  {
    progress_bar bar("checking", "parts", common.quiet);
    options.progress = [&](double share) {
      bar.update(static_cast<std::int64_t>(share * 1000), 1000);
    };
    report = traces::check(trace, options);
  }
  fmt::print(
      "check      {} rows, {} values; largest lse error {:.2e}, o error {:.2e} of 1 + |o|; {} "
      "non-finite\n",
      report.rows_checked, report.values_checked, report.max_lse_error, report.max_o_error,
      report.nonfinite_values);
  for (const auto& finding : report.findings) fmt::print("  {}\n", finding.text);
  const auto shown = static_cast<std::int64_t>(report.findings.size());
  if (report.finding_count > shown) fmt::print("  ... and {} more\n", report.finding_count - shown);
  fmt::print("{}\n", report.ok() ? "ok" : fmt::format("{} findings", report.finding_count));
  return report.ok() ? exit_ok : exit_failed;
}

}  // namespace

int run_inspect(const common_options& common, const inspect_command& command) {
  const traces::reader trace(command.trace, {.recover = command.recover});
  fmt::print("{}: kvtrace, {}, by {}, {}{}\n", trace.path(),
             bytes_text(static_cast<double>(trace.file_bytes())), trace.producer(), trace.created(),
             trace.complete() ? "" : ", UNFINISHED");
  print_model(trace.model());
  for (const auto& s : trace.sequences()) print_sequence(trace, s);
  int code = command.check ? check_trace(trace, common, command.all) : exit_ok;
  if (!trace.complete() && code == exit_ok) {
    for (const auto& s : trace.sequences()) {
      fmt::print(stderr, "kvreplay: {}: recovered {} whole positions of sequence {}\n",
                 trace.path(), s.n_tokens, s.id);
    }
    code = exit_recovered;
  }
  return code;
}

}  // namespace kvreplay::replay
