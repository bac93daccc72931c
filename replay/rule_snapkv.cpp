// snapkv: mean attention of the last `obs` queries, pooled over neighbours (arXiv 2404.14469).
// A query's mean counts only towards the entries that it could see.
#include <deque>
#include <utility>

#include "replay/bind.hpp"
#include "replay/host_rule.hpp"
#include "replay/pool.hpp"

namespace kvreplay::replay {
namespace {

// What one query gave the entries that were held when it came, one KV head.
using observed_row = std::vector<std::pair<std::int32_t, float>>;  // position, mass

class rule final : public cloned_rule<rule> {
 public:
  rule(const policies::policy& policy, const kernels::cache_shape& shape)
      : score_(policy.score),
        once_(policy.trigger.prefill_only),
        rows_(static_cast<size_t>(shape.kv_heads)) {}

  void see_prompt(const rule_context& at, const layer_data& data,
                  prompt_observations& prompt) override {
    const auto layout = layout_of(score_);
    prompt_ = prompt.scores(score_, layout);
    n_prompt_ = data.n_prompt;
    if (once_) return;
    const std::int64_t window = at.cache.shape().window_of(at.slot);
    prompt.each_of_last(score_.obs, layout, [&](std::int64_t row, const float* mass) {
      const std::int64_t begin = window > 0 ? std::max<std::int64_t>(0, row + 1 - window) : 0;
      for (int g = 0; g < at.cache.shape().kv_heads; ++g) {
        observed_row seen;
        for (std::int64_t i = begin; i <= row; ++i) {
          seen.emplace_back(static_cast<std::int32_t>(i), mass[g * n_prompt_ + i]);
        }
        rows_[static_cast<size_t>(g)].push_back(std::move(seen));
      }
    });
  }

  void see_step(const rule_context& at, const step_view& step) override {
    if (step.mass == nullptr) return;
    prompt_ = {};
    for (int g = 0; g < at.cache.shape().kv_heads; ++g) {
      const auto& store = at.cache.head(at.slot, g);
      observed_row seen;
      for (int e = 0; e < store.size(); ++e) {
        seen.emplace_back(store.position(e), step.mass[g * step.stride + e]);
      }
      auto& ring = rows_[static_cast<size_t>(g)];
      ring.push_back(std::move(seen));
      if (std::ssize(ring) > score_.obs) ring.pop_front();
    }
  }

  void worth(const rule_context& at, int kv_head, std::vector<float>& out) override {
    const auto& store = at.cache.head(at.slot, kv_head);
    out.clear();
    if (!prompt_.empty()) {  // at P-1
      for (int e = 0; e < store.size(); ++e) {
        out.push_back(prompt_[static_cast<size_t>(kv_head * n_prompt_ + store.position(e))]);
      }
    } else {
      mean_of_rows(at, kv_head, out);
    }
    pool_scores(position_order(store), score_.kernel, score_.pool, out);
  }

  std::int64_t state_bytes() const override {
    std::int64_t pairs = 0;
    for (const auto& ring : rows_) {
      for (const auto& row : ring) pairs += std::ssize(row);
    }
    return pairs * static_cast<std::int64_t>(sizeof(observed_row::value_type));
  }

 private:
  void mean_of_rows(const rule_context& at, int kv_head, std::vector<float>& out) {
    const auto& store = at.cache.head(at.slot, kv_head);
    std::vector<double> sum(static_cast<size_t>(at.step + 1), 0.0);
    std::vector<int> count(sum.size(), 0);
    for (const auto& row : rows_[static_cast<size_t>(kv_head)]) {
      for (const auto& [position, mass] : row) {
        sum[static_cast<size_t>(position)] += mass;
        ++count[static_cast<size_t>(position)];
      }
    }
    for (int e = 0; e < store.size(); ++e) {
      const auto p = static_cast<size_t>(store.position(e));
      out.push_back(count[p] > 0 ? static_cast<float>(sum[p] / count[p]) : 0.0F);
    }
  }

  policies::score_rule score_;
  bool once_;
  std::int64_t n_prompt_ = 0;
  std::vector<float> prompt_;                   // [kv_heads, P] until the first decode step
  std::vector<std::deque<observed_row>> rows_;  // [kv_heads][<= obs]
};

}  // namespace

std::unique_ptr<host_rule> snapkv_rule(const policies::policy& policy,
                                       const kernels::cache_shape& shape) {
  return std::make_unique<rule>(policy, shape);
}

}  // namespace kvreplay::replay
