#include <fmt/format.h>

#include "replay/commands.hpp"
#include "replay/fit_retention.hpp"
#include "replay/progress.hpp"
#include "reports/atomic_file.hpp"

namespace kvreplay::replay {

int run_fit_retention(const common_options& common, const fit_retention_command& command) {
  reports::probe_writable(command.output);
  const traces::reader trace(command.trace);
  fit_options options;
  options.projection = command.projection == "shared"  ? gate_projection::shared
                       : command.projection == "layer" ? gate_projection::layer
                                                       : gate_projection::head;
  options.hidden = command.hidden;
  options.epochs = command.epochs;
  options.train_share = command.train_share;
  options.seed = command.seed;
  fit_outcome fit;
  {
    progress_bar bar("fitting", "epochs", common.quiet);
    options.progress = [&](auto done, auto total) { bar.update(done, total); };
    fit = fit_retention(trace, options);
  }
  traces::copy_with_retention(command.trace, command.output, fit.rows, fit.gate);
  fmt::print("fitted on {}, checked on {}\n",
             fit.held_out.empty()
                 ? fmt::format("positions below {}", fit.first_held)
                 : fmt::format("{} sequences", trace.sequences().size() - fit.held_out.size()),
             fit.held_out.empty() ? "the rest of the one sequence"
                                  : fmt::format("{} others", fit.held_out.size()));
  fmt::print(
      "loss, nats per entry and age:   {:.4f} fitted, {:.4f} held out ({:.4f} with one decay a "
      "head)\n",
      fit.train_loss, fit.held_loss, fit.held_loss_constant);
  fmt::print(
      "rank correlation with the attention still to come, held out:   {:.3f} ({:.3f} by recency "
      "alone)\n",
      fit.rank_correlation, fit.recency_correlation);
  fmt::print(
      "{}: a copy with `retention` and the gate; compare trimkv and dbtrimkv with h2o at equal "
      "bytes on what was held out\n",
      command.output);
  return exit_ok;
}

}  // namespace kvreplay::replay
