#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "replay/commands.hpp"
#include "replay/head_scores.hpp"
#include "replay/progress.hpp"
#include "reports/atomic_file.hpp"

namespace kvreplay::replay {

int run_headscore(const common_options& common, const headscore_command& command) {
  reports::probe_writable(command.output);
  head_scores table;
  {
    progress_bar bar("head scores", "layers", common.quiet);
    table = measure_head_scores(command.traces,
                                [&](auto done, auto total) { bar.update(done, total); });
  }
  reports::write_atomic(command.output, head_scores_json(table));
  struct place {
    double score;
    std::size_t layer, head;
  };
  std::vector<place> order;
  for (std::size_t l = 0; l < table.scores.size(); ++l) {
    for (std::size_t h = 0; h < table.scores[l].size(); ++h)
      order.push_back({table.scores[l][h], l, h});
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const place& a, const place& b) { return a.score > b.score; });
  fmt::print("{} probes, {} rows; the heads that retrieve most:\n", table.probes, table.rows);
  fmt::print("{:>5}{:>6}{:>10}\n", "layer", "head", "score");
  for (std::size_t i = 0; i < std::min<std::size_t>(10, order.size()); ++i) {
    fmt::print("{:>5}{:>6}{:>10.5f}\n", order[i].layer, order[i].head, order[i].score);
  }
  if (order.front().score == 0) {
    fmt::print(stderr, "kvreplay: no head's top entries lie in a needle: all scores are 0\n");
  }
  return exit_ok;
}

}  // namespace kvreplay::replay
