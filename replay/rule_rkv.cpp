// rkv: lambda * importance - (1 - lambda) * redundancy (R-KV, arXiv 2505.24133, section 3). The
// importance of an entry is its attention from the last `obs` queries, each query's logits reduced
// to the largest of the group before the softmax, pooled over neighbours; its redundancy the
// softmax over entries of the mean cosine between its key and theirs, where every entry spares the
// newest of its near-duplicates.
#include <algorithm>
#include <cmath>
#include <deque>

#include "kernels/entry_rows.hpp"
#include "replay/host_rule.hpp"
#include "replay/pool.hpp"
#include "replay/redundancy.hpp"

namespace kvreplay::replay {
namespace {

struct observed_query {
  std::int64_t position = 0;
  std::vector<float> q;  // [q_heads, head_dim]
};

void softmax(std::vector<double>& x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (double& value : x) sum += value = std::exp(value - top);
  for (double& value : x) value /= sum;
}

class rule final : public cloned_rule<rule> {
 public:
  explicit rule(const policies::score_rule& score) : score_(score) {}

  void see_prompt(const rule_context& at, const layer_data& data, prompt_observations&) override {
    const std::int64_t begin =
        std::max({std::int64_t{0}, data.n_prompt - score_.obs, data.first_row});
    for (std::int64_t t = begin; t < data.n_prompt; ++t) see(at, t, data.q_at(t));
  }

  void see_step(const rule_context& at, const step_view& step) override {
    see(at, at.step, step.q);
  }

  void worth(const rule_context& at, int kv_head, std::vector<float>& out) override {
    const auto& store = at.cache.head(at.slot, kv_head);
    const auto order = position_order(store);
    const auto dim = static_cast<size_t>(at.cache.shape().head_dim), n = order.size();
    const auto stored = kernels::entry_keys(at.cache, at.slot, kv_head);
    std::vector<float> keys(n * dim);  // in position order
    for (size_t i = 0; i < n; ++i) {
      std::copy_n(&stored[static_cast<size_t>(order[i]) * dim], dim, &keys[i * dim]);
    }
    std::vector<float> importance(n);
    const auto mean = mean_attention(at, kv_head, order, keys);
    for (size_t i = 0; i < n; ++i) importance[static_cast<size_t>(order[i])] = mean[i];
    pool_scores(order, score_.kernel, score_.pool, importance);
    const auto redundant = redundancies(keys, dim);
    out.resize(n);
    for (size_t i = 0; i < n; ++i) {
      const auto e = static_cast<size_t>(order[i]);
      out[e] =
          static_cast<float>(score_.lambda * importance[e] - (1 - score_.lambda) * redundant[i]);
    }
  }

  std::int64_t state_bytes() const override {
    std::int64_t bytes = 0;
    for (const auto& query : queries_) bytes += std::ssize(query.q) * 4;
    return bytes;
  }

 private:
  void see(const rule_context& at, std::int64_t position, const float* q) {
    const auto& shape = at.cache.shape();
    queries_.push_back({position, {q, q + std::int64_t{shape.q_heads} * shape.head_dim}});
    if (std::ssize(queries_) > score_.obs) queries_.pop_front();
  }

  // [entries in position order]: mean over the queries that can see the entry.
  std::vector<float> mean_attention(const rule_context& at, int kv_head,
                                    const std::vector<int>& order, const std::vector<float>& keys) {
    const auto& shape = at.cache.shape();
    const auto& store = at.cache.head(at.slot, kv_head);
    const auto dim = static_cast<size_t>(shape.head_dim);
    std::vector<double> sum(order.size(), 0.0), logits;
    std::vector<int> count(order.size(), 0);
    for (const auto& query : queries_) {
      logits.clear();
      for (size_t i = 0; i < order.size() && store.position(order[i]) <= query.position; ++i) {
        double best = -INFINITY;
        for (int h = kv_head * shape.group(); h < (kv_head + 1) * shape.group(); ++h) {
          const float* q = &query.q[static_cast<size_t>(h) * dim];
          double dot = 0;
          for (size_t c = 0; c < dim; ++c) dot += static_cast<double>(q[c]) * keys[i * dim + c];
          best = std::max(best, dot * shape.softmax_scale);
        }
        logits.push_back(best);
      }
      if (logits.empty()) continue;
      softmax(logits);
      for (size_t i = 0; i < logits.size(); ++i) {
        sum[i] += logits[i];
        ++count[i];
      }
    }
    std::vector<float> mean(order.size());
    for (size_t i = 0; i < mean.size(); ++i) {
      mean[i] = count[i] > 0 ? static_cast<float>(sum[i] / count[i]) : 0.0F;
    }
    return mean;
  }

  policies::score_rule score_;
  std::deque<observed_query> queries_;  // the last `obs`
};

}  // namespace

std::unique_ptr<host_rule> rkv_rule(const policies::policy& policy, const kernels::cache_shape&) {
  return std::make_unique<rule>(policy.score);
}

}  // namespace kvreplay::replay
