// fit_retention: learns retention gates (TrimKV, arXiv 2512.03324) offline from recorded attention.
// A gate sees an entry's key and value and gives beta; the entry should be alive at age a with
// probability beta^a, alive as survival.hpp says. Fitted by Adam on the Bernoulli likelihood of
// y a ln beta + (1 - y) ln(1 - beta^a) over ages 1, 2, 4 ...
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "traces/reader.hpp"
#include "traces/retention_gate.hpp"

namespace kvreplay::replay {

enum class gate_projection : std::uint8_t { shared, layer, head };

struct fit_options {
  gate_projection projection = gate_projection::shared;
  int hidden = 16;
  int epochs = 30;
  double learning_rate = 0.01;
  double train_share = 0.75;  // of the sequences (of the positions, where there is one)
  std::uint64_t seed = 0;
  std::function<void(std::int64_t done, std::int64_t total)> progress;  // epochs
};

struct fit_outcome {
  traces::retention_gate gate;
  // rows[sequence][recorded layer]: ln beta [n_tokens, kv_heads]
  std::vector<std::vector<std::vector<float>>> rows;
  std::vector<int> held_out;    // sequences that took no part; empty: the last positions of the one
  std::int64_t first_held = 0;  // with one sequence: positions from here on took no part
  double train_loss = 0, held_loss = 0;  // nats per (entry, age)
  double held_loss_constant = 0;  // the same with one beta per head, fitted on the training part
  // Spearman, mean over heads and moments of the held-out part: of -(age) ln beta's order with the
  // mass that the held entries still draw, and of plain recency with it.
  double rank_correlation = 0, recency_correlation = 0;
};

// Throws traces::trace_error where a trace has too little to learn from. Deterministic by seed, for
// any thread count.
fit_outcome fit_retention(const traces::reader& trace, const fit_options& options);

}  // namespace kvreplay::replay
