#include "replay/kept_log.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvreplay::replay {

kept_log::kept_log(int layers, int kv_heads, std::int64_t n_prompt)
    : kv_heads_(kv_heads),
      n_prompt_(n_prompt),
      dropped_(static_cast<size_t>(layers) * static_cast<size_t>(kv_heads)),
      held_(dropped_.size()) {}

void kept_log::note(const kernels::kv_cache& cache, int slot, std::int64_t step) {
  for (int g = 0; on() && g < kv_heads_; ++g) {
    const auto at = static_cast<size_t>(slot * kv_heads_ + g);
    auto now = cache.positions(slot, g);
    auto& held = held_[at];
    // What was held before, and what has been appended since: the prompt, or the newcomer.
    const std::int64_t newcomers = step == n_prompt_ - 1 ? 0 : step;
    for (std::int64_t t = newcomers; t <= step; ++t) held.push_back(static_cast<std::int32_t>(t));
    dropped_positions gone;
    gone.step = step;
    std::set_difference(held.begin(), held.end(), now.begin(), now.end(),
                        std::back_inserter(gone.positions));
    if (!gone.positions.empty()) dropped_[at].push_back(std::move(gone));
    held = std::move(now);
  }
}

void kept_log::rewind(const kernels::kv_cache& cache, std::int64_t step) {
  for (size_t at = 0; at < dropped_.size(); ++at) {
    auto& log = dropped_[at];
    while (!log.empty() && log.back().step >= step) log.pop_back();
    const auto index = static_cast<int>(at);
    held_[at] = cache.positions(index / kv_heads_, index % kv_heads_);
  }
}

}  // namespace kvreplay::replay
