#include <fmt/format.h>

#include <charconv>
#include <cstdio>

#include "replay/commands.hpp"
#include "replay/device_choice.hpp"
#include "replay/progress.hpp"
#include "replay/text.hpp"
#include "tracer/model.hpp"
#include "tracer/record.hpp"

namespace kvreplay::replay {
namespace {

// none | full | every=k
int attention_every(const std::string& text) {
  if (text == "none") return 0;
  if (text == "full") return 1;
  const std::string prefix = "every=";
  int k = 0;
  if (text.rfind(prefix, 0) == 0) {
    const char* end = text.data() + text.size();
    const auto [at, error] = std::from_chars(text.data() + prefix.size(), end, k);
    if (error == std::errc() && at == end && k >= 1) return k;
  }
  throw usage_error(
      fmt::format("--attention {}: expected none, full or every=k with k >= 1", text));
}

}  // namespace

int run_record(const common_options& common, record_command command) {
  require_cpu(common.device, "record");
  auto& o = command.options;
  if (o.generate.has_value() == o.prompt_length.has_value()) {
    throw usage_error(
        o.generate ? "--generate and --prompt-length exclude each other: with --generate all "
                     "tokens are the prompt"
                   : "record needs --prompt-length P (teacher-forced) or --generate N");
  }
  o.kv_fp32 = command.kv_dtype == "fp32";
  o.full_logits = command.logits == "full";
  o.attention_every = attention_every(command.attention);
  o.rows_decode = command.rows == "decode";
  for (const auto& with : command.with) {
    o.with_wo = o.with_wo || with == "wo";
    o.with_value_norm = o.with_value_norm || with == "value_norm";
    o.with_residual = o.with_residual || with == "residual";
  }
  o.tokens = tracer::read_token_file(command.tokens_file);
  o.producer = producer_text();
  std::vector<std::string> notes;
  const auto model = tracer::model::load(command.model_directory, &notes);
  if (!common.quiet) {
    for (const auto& note : notes) fmt::print(stderr, "kvreplay: note: {}\n", note);
    fmt::print(stderr, "kvreplay: {} will take {}\n", command.output,
               bytes_text(static_cast<double>(tracer::projected_bytes(model.config(), o))));
  }
  tracer::record_summary summary;
  {
    progress_bar bar("recording", "tokens", common.quiet);
    summary = tracer::record(model, command.output, o, [&](const tracer::record_progress& p) {
      bar.update(p.done, p.total);
    });
  }
  fmt::print("{}: {} positions, {}, {:.2f} s, {:.1f} tokens/s\n", command.output, summary.positions,
             bytes_text(static_cast<double>(summary.bytes)), summary.seconds,
             static_cast<double>(summary.positions) / summary.seconds);
  if (!summary.generated.empty()) {
    fmt::print("{}\n", fmt::join(summary.generated, " "));
  }
  return exit_ok;
}

}  // namespace kvreplay::replay
