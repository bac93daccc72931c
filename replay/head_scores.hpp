// head_scores: how much each query head retrieves, measured on needle probes (HeadKV, arXiv
// 2410.19258): the attention that lands in the needle among a row's top entries, as many as the
// needle is long.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "traces/reader.hpp"

namespace kvreplay::replay {

struct head_scores {
  std::vector<std::vector<double>>
      scores;                         // [layers][query heads], sum 1 (all 0: no head retrieves)
  std::int64_t probes = 0, rows = 0;  // needles measured; rows over all probes
};

// Over all sequences of all traces that have a span `needle`. A probe's rows are the steps that
// predict its `answer` span where there is one, else all decode steps; a row counts if it comes
// behind the needle. Throws traces::trace_error where no trace has a needle, a trace lacks layers
// or the models' shapes differ.
head_scores measure_head_scores(
    const std::vector<std::string>& paths,
    const std::function<void(std::int64_t done, std::int64_t total)>& progress = {});

// The table that `headkv:table=` reads.
std::string head_scores_json(const head_scores& table);

}  // namespace kvreplay::replay
