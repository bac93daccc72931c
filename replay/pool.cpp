#include "replay/pool.hpp"

#include <algorithm>
#include <numeric>

namespace kvreplay::replay {

std::vector<int> position_order(const kernels::head_store& store) {
  std::vector<int> order(static_cast<size_t>(store.size()));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int a, int b) { return store.position(a) < store.position(b); });
  return order;
}

void pool_scores(std::span<const int> order, int kernel, policies::pool_kind kind,
                 std::vector<float>& scores) {
  const auto n = static_cast<std::ptrdiff_t>(order.size());
  const std::ptrdiff_t reach = kernel / 2;
  const std::vector<float> plain = scores;
  for (std::ptrdiff_t i = 0; i < n; ++i) {
    const auto begin = std::max<std::ptrdiff_t>(0, i - reach), end = std::min(n, i + reach + 1);
    const auto value = [&](std::ptrdiff_t j) {
      return plain[static_cast<size_t>(order[static_cast<size_t>(j)])];
    };
    float& out = scores[static_cast<size_t>(order[static_cast<size_t>(i)])];
    if (kind == policies::pool_kind::max) {
      out = value(begin);
      for (auto j = begin + 1; j < end; ++j) out = std::max(out, value(j));
    } else {
      double sum = 0;
      for (auto j = begin; j < end; ++j) sum += value(j);
      out = static_cast<float>(sum / kernel);
    }
  }
}

}  // namespace kvreplay::replay
