// survival: how long entries go on drawing attention. An entry of a KV head is alive at age a if a
// row at least a positions after it gave it more than the uniform share, by the mean over the
// head's query heads. What a geometric decay beta^a of that share looks like is what TrimKV's gates
// model (arXiv 2512.03324).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "traces/reader.hpp"

namespace kvreplay::replay {

// Per position of one KV head: the age of the last row that gave it more than the uniform share; -1
// where none did. [kv_heads][n_tokens]
using last_ages = std::vector<std::vector<std::int32_t>>;

// Of one layer, from the rows the trace has q for, those before row `end` (0: all). O(n_tokens^2)
// time, bounded memory.
last_ages measure_last_ages(const traces::reader& trace, int sequence, int layer,
                            std::int64_t end = 0);

struct survival_curve {
  int layer = 0, kv_head = 0;
  std::vector<std::int32_t> age;   // 1, 2, 4, ... below the sequence's length
  std::vector<double> alive;       // share of the entries that could be seen at that age
  std::vector<std::int64_t> seen;  // how many those are
  double beta = 0;                 // maximum likelihood of alive(a) = beta^a, all ages together
  double worst = 0;                // largest |alive(a) - beta^a|
  double log_likelihood_gain = 0;  // nats per observation over the best constant share
};

// The curves of all recorded layers and KV heads, sequences pooled. progress: layers done, in all.
std::vector<survival_curve> measure_survival(
    const traces::reader& trace,
    const std::function<void(std::int64_t done, std::int64_t total)>& progress = {});

// The beta in (0, 1) that makes most likely that of seen[i] entries a share alive[i] is alive at
// age[i], independently: maximises sum seen (alive a ln beta + (1 - alive) ln(1 - beta^a)).
double fit_geometric(const std::vector<std::int32_t>& age, const std::vector<double>& alive,
                     const std::vector<std::int64_t>& seen);

}  // namespace kvreplay::replay
