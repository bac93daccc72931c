// scissorhands: minus the number of the last `history` steps in which an entry got less than an
// even share, 1 / (entries held), of its head's attention (arXiv 2305.17118).
#include <algorithm>

#include "replay/bind.hpp"
#include "replay/host_rule.hpp"

namespace kvreplay::replay {
namespace {

constexpr int word_bits = 64;

// One KV head: a ring of bits for every held entry, in ascending order of position.
struct head_history {
  std::vector<std::int32_t> position;
  std::vector<int> low;              // set bits of the entry
  std::vector<std::uint64_t> words;  // [entries, words per entry]
};

class rule final : public cloned_rule<rule> {
 public:
  rule(const policies::policy& policy, const kernels::cache_shape& shape)
      : score_(policy.score),
        words_(static_cast<size_t>((policy.score.history + word_bits - 1) / word_bits)),
        heads_(static_cast<size_t>(shape.kv_heads)) {}

  void see_prompt(const rule_context& at, const layer_data& data,
                  prompt_observations& prompt) override {
    const std::int64_t n = data.n_prompt, window = at.cache.shape().window_of(at.slot);
    prompt.each_of_last(
        score_.history, layout_of(score_), [&](std::int64_t row, const float* mass) {
          const std::int64_t begin = window > 0 ? std::max<std::int64_t>(0, row + 1 - window) : 0;
          for (int g = 0; g < at.cache.shape().kv_heads; ++g) {
            positions_.clear();
            for (std::int64_t i = begin; i <= row; ++i) {
              positions_.push_back(static_cast<std::int32_t>(i));
            }
            add_row(heads_[static_cast<size_t>(g)], mass + g * n + begin);
          }
          ++steps_;
        });
  }

  void see_step(const rule_context& at, const step_view& step) override {
    if (step.mass == nullptr) return;
    std::vector<float> mass;
    std::vector<std::pair<std::int32_t, float>> order;
    for (int g = 0; g < at.cache.shape().kv_heads; ++g) {
      const auto& store = at.cache.head(at.slot, g);
      order.clear();
      for (int e = 0; e < store.size(); ++e) {
        order.emplace_back(store.position(e), step.mass[g * step.stride + e]);
      }
      std::sort(order.begin(), order.end());
      positions_.clear();
      mass.clear();
      for (const auto& [position, value] : order) {
        positions_.push_back(position);
        mass.push_back(value);
      }
      add_row(heads_[static_cast<size_t>(g)], mass.data());
    }
    ++steps_;
  }

  void worth(const rule_context& at, int kv_head, std::vector<float>& out) override {
    const auto& store = at.cache.head(at.slot, kv_head);
    const auto& known = heads_[static_cast<size_t>(kv_head)];
    out.clear();
    for (int e = 0; e < store.size(); ++e) {
      const auto found =
          std::lower_bound(known.position.begin(), known.position.end(), store.position(e));
      const bool there = found != known.position.end() && *found == store.position(e);
      const auto i = static_cast<size_t>(found - known.position.begin());
      out.push_back(there ? -static_cast<float>(known.low[i]) : 0.0F);
    }
  }

  std::int64_t state_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& head : heads_) {
      bytes += std::ssize(head.words) * 8 + std::ssize(head.position) * 8;
    }
    return bytes;
  }

 private:
  // The entries that are held now are positions_, ascending, with their mass. Those that left are
  // forgotten, newcomers are at the end.
  void add_row(head_history& head, const float* mass) {
    const std::int64_t slot = steps_ % score_.history;
    const auto word = static_cast<size_t>(slot / word_bits);
    const std::uint64_t bit = std::uint64_t{1} << (slot % word_bits);
    // An even share itself is not low, however it was rounded.
    const auto even = static_cast<float>((1 - 1e-5) / static_cast<double>(positions_.size()));
    head_history next;
    next.position = positions_;
    next.words.reserve(positions_.size() * words_);
    size_t from = 0;
    for (size_t i = 0; i < positions_.size(); ++i) {
      while (from < head.position.size() && head.position[from] < positions_[i]) ++from;
      const bool known = from < head.position.size() && head.position[from] == positions_[i];
      int low = known ? head.low[from] : 0;
      const auto begin = next.words.size();
      if (known) {
        const auto at = head.words.begin() + static_cast<std::ptrdiff_t>(from * words_);
        next.words.insert(next.words.end(), at, at + static_cast<std::ptrdiff_t>(words_));
      } else {
        next.words.resize(begin + words_, 0);
      }
      std::uint64_t& w = next.words[begin + word];
      if ((w & bit) != 0) --low;
      w &= ~bit;
      if (mass[i] < even) {
        w |= bit;
        ++low;
      }
      next.low.push_back(low);
    }
    head = std::move(next);
  }

  policies::score_rule score_;
  size_t words_;
  std::int64_t steps_ = 0;
  std::vector<head_history> heads_;      // [kv_heads]
  std::vector<std::int32_t> positions_;  // scratch
};

}  // namespace

std::unique_ptr<host_rule> scissorhands_rule(const policies::policy& policy,
                                             const kernels::cache_shape& shape) {
  return std::make_unique<rule>(policy, shape);
}

}  // namespace kvreplay::replay
