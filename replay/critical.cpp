#include "replay/critical.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <utility>

#include "kernels/select.hpp"

namespace kvreplay::replay {
namespace {

// Mean over the query heads of a KV head, or of the layer where all its heads keep one set.
double mean_norm(const lane& lane, std::span<const float> norms, int head, std::int64_t position) {
  const auto& shape = lane.cache().shape();
  const bool whole = lane.rules().one_set;
  const int first = whole ? 0 : head * shape.group();
  const int count = whole ? shape.q_heads : shape.group();
  double sum = 0;
  for (int h = first; h < first + count; ++h) {
    sum += norms[static_cast<size_t>(position * shape.q_heads + h)];
  }
  return sum / count;
}

}  // namespace

void apply_critical(const lane& lane, int slot, std::int64_t step, const layer_inputs& inputs,
                    const policies::protection& protect, std::span<const int> budget,
                    std::span<std::vector<float>> worth, step_events& events) {
  const auto& rule = lane.policy().critical;
  const auto& cache = lane.cache();
  if (std::ssize(inputs.value_norm) < (step + 1) * cache.shape().q_heads) {
    throw std::invalid_argument("critical: no value_norm for every position up to the step");
  }
  for (int h = 0; h < cache.shape().kv_heads; ++h) {
    const auto& store = cache.head(slot, h);
    auto& s = worth[static_cast<size_t>(h)];
    if (store.size() <= budget[static_cast<size_t>(h)]) continue;
    std::vector<std::pair<std::uint64_t, int>> ranked;  // the entries that compete, best first
    double sum = 0;
    for (int e = 0; e < store.size(); ++e) {
      const auto position = store.position(e);
      if (position < protect.sinks || position > step - protect.recent) continue;
      ranked.emplace_back(kernels::rank_key(s[static_cast<size_t>(e)], position), e);
      sum += s[static_cast<size_t>(e)];
    }
    std::sort(ranked.begin(), ranked.end(), std::greater<>());
    const int guarded = store.size() - static_cast<int>(ranked.size());
    const int own = std::max(0, budget[static_cast<size_t>(h)] - guarded);
    const auto first = static_cast<size_t>(std::floor(rule.first * own));
    double held = 0;
    for (size_t i = 0; i < ranked.size(); ++i) {
      float& score = s[static_cast<size_t>(ranked[i].second)];
      const double share = sum > 0 ? score / sum : 0;
      if (i < first) {
        held += share;
        score = std::numeric_limits<float>::max();
      } else {
        const auto position = store.position(ranked[i].second);
        score = static_cast<float>((share + rule.epsilon) *
                                   mean_norm(lane, inputs.value_norm, h, position));
      }
    }
    ++events.critical_heads;
    if (held > 0.5) ++events.critical_over_half;
  }
}

}  // namespace kvreplay::replay
