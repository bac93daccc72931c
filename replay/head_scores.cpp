#include "replay/head_scores.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>

#include "replay/bind.hpp"
#include "replay/recorded_rows.hpp"

namespace kvreplay::replay {
namespace {

using range = std::pair<std::int64_t, std::int64_t>;

// What one sequence is asked: which positions are the needle, which rows count.
struct probe {
  const traces::reader* trace = nullptr;
  int sequence = 0;
  std::vector<std::uint8_t> needle;  // [n_tokens]
  std::int64_t length = 0, first = 0, last = 0;
};

std::vector<range> span_of(const traces::sequence_info& info, const std::string& name) {
  std::vector<range> out;
  for (const auto& [span, ranges] : info.spans) {
    if (span != name) continue;
    for (const auto& [begin, end] : ranges) out.emplace_back(begin, end);
  }
  return out;
}

std::vector<probe> probes_of(const traces::reader& trace) {
  std::vector<probe> out;
  for (const auto& info : trace.sequences()) {
    const auto needle = span_of(info, "needle"), answer = span_of(info, "answer");
    if (needle.empty()) continue;
    probe p;
    p.trace = &trace;
    p.sequence = info.id;
    p.needle.assign(static_cast<size_t>(info.n_tokens), 0);
    std::int64_t behind = 0;
    for (const auto& [begin, end] : needle) {
      for (std::int64_t i = begin; i < std::min<std::int64_t>(end, info.n_tokens); ++i) {
        p.length += p.needle[static_cast<size_t>(i)] == 0 ? 1 : 0;
        p.needle[static_cast<size_t>(i)] = 1;
        behind = std::max(behind, i + 1);
      }
    }
    p.first = std::max<std::int64_t>(info.n_prompt, behind);
    p.last = info.n_tokens;
    if (!answer.empty()) {
      p.first = std::max(behind, answer.front().first - 1);
      p.last = std::min<std::int64_t>(info.n_tokens, answer.back().second - 1);
    }
    if (p.first < p.last) out.push_back(std::move(p));
  }
  return out;
}

// Sum over the row's `length` largest entries of those that lie in the needle. Equal values: the
// newer position first, as everywhere.
double retrieved(std::span<const float> row, const probe& p, std::vector<std::int32_t>& order) {
  order.resize(row.size());
  std::iota(order.begin(), order.end(), 0);
  const auto top = order.begin() + std::min<std::int64_t>(p.length, std::ssize(order));
  std::partial_sort(order.begin(), top, order.end(), [&](std::int32_t a, std::int32_t b) {
    const float x = row[static_cast<size_t>(a)], y = row[static_cast<size_t>(b)];
    return x != y ? x > y : a > b;
  });
  double sum = 0;
  for (auto at = order.begin(); at != top; ++at) {
    if (p.needle[static_cast<size_t>(*at)] != 0) sum += row[static_cast<size_t>(*at)];
  }
  return sum;
}

void check_models(const std::vector<std::unique_ptr<traces::reader>>& traces) {
  const auto& first = traces.front()->model();
  for (const auto& trace : traces) {
    const auto& m = trace->model();
    if (!m.records_all_layers()) {
      throw traces::trace_error(
          fmt::format("{}: head scores need every layer, it has {} of {}; record without --layers",
                      trace->path(), m.layers.size(), m.n_layers));
    }
    if (m.n_layers == first.n_layers && m.n_q_heads == first.n_q_heads) continue;
    throw traces::trace_error(fmt::format(
        "{}: {} layers of {} query heads, but {} has {} of {}: one table is of one model",
        trace->path(), m.n_layers, m.n_q_heads, traces.front()->path(), first.n_layers,
        first.n_q_heads));
  }
}

}  // namespace

head_scores measure_head_scores(
    const std::vector<std::string>& paths,
    const std::function<void(std::int64_t done, std::int64_t total)>& progress) {
  std::vector<std::unique_ptr<traces::reader>> traces;
  std::vector<probe> probes;
  for (const auto& path : paths) {
    traces.push_back(std::make_unique<traces::reader>(path));
    for (auto& p : probes_of(*traces.back())) probes.push_back(std::move(p));
  }
  check_models(traces);
  if (probes.empty()) {
    throw traces::trace_error(fmt::format(
        "{}: no sequence has a span `needle` with steps behind it; record needle probes with spans",
        paths.front()));
  }
  const auto& model = traces.front()->model();
  head_scores out;
  out.probes = std::ssize(probes);
  for (const auto& p : probes) out.rows += p.last - p.first;
  out.scores.assign(static_cast<size_t>(model.n_layers),
                    std::vector<double>(static_cast<size_t>(model.n_q_heads)));
  std::mutex mutex;
  std::int64_t done = 0;
  tbb::parallel_for(0, model.n_layers, [&](int layer) {
    auto& scores = out.scores[static_cast<size_t>(layer)];
    std::vector<std::int32_t> order;
    for (const auto& p : probes) {
      const auto shape = cache_shape_for(p.trace->model(), {&layer, 1});
      const auto data = load_layer(*p.trace, p.sequence, layer);
      const std::int64_t first = std::max(p.first, data.first_row);
      for_each_row(shape, data, first, p.last, [&](const attention_rows& at) {
        for (int h = 0; h < shape.q_heads; ++h) {
          scores[static_cast<size_t>(h)] +=
              retrieved(at.head(h), p, order) / static_cast<double>(p.last - first);
        }
      });
    }
    const std::scoped_lock lock(mutex);
    if (progress) progress(++done, model.n_layers);
  });
  double total = 0;
  for (const auto& layer : out.scores) total += std::accumulate(layer.begin(), layer.end(), 0.0);
  for (auto& layer : out.scores) {
    for (double& s : layer) s = total > 0 ? s / total : 0;
  }
  return out;
}

std::string head_scores_json(const head_scores& table) {
  nlohmann::ordered_json out;
  out["schema"] = "kvreplay.headscores/1";
  out["probes"] = table.probes;
  out["scores"] = table.scores;
  return out.dump(1) + "\n";
}

}  // namespace kvreplay::replay
