// keydiff: minus the cosine between an entry's key and the mean key of those held (arXiv
// 2504.15364).
#include <algorithm>
#include <cmath>
#include <utility>

#include "kernels/entry_rows.hpp"
#include "replay/host_rule.hpp"

namespace kvreplay::replay {
namespace {

class rule final : public cloned_rule<rule> {
 public:
  void worth(const rule_context& at, int kv_head, std::vector<float>& out) override {
    const auto dim = static_cast<size_t>(at.cache.shape().head_dim);
    const auto n = static_cast<size_t>(at.cache.entries(at.slot, kv_head));
    const auto keys = kernels::entry_keys(at.cache, at.slot, kv_head);
    const std::vector<double> mean = mean_key(at, kv_head, keys, n, dim);
    double mean2 = 0;
    for (const double x : mean) mean2 += x * x;
    out.resize(n);
    for (size_t e = 0; e < n; ++e) {
      double dot = 0, key2 = 0;
      for (size_t c = 0; c < dim; ++c) {
        const double x = keys[e * dim + c];
        dot += x * mean[c];
        key2 += x * x;
      }
      const double norms = std::sqrt(key2 * mean2);
      out[e] = norms > 0 ? static_cast<float>(-dot / norms) : 0.0F;
    }
  }

 private:
  // In position order: slots have none, and sums must not depend on how entries got to theirs.
  static std::vector<double> mean_key(const rule_context& at, int kv_head,
                                      const std::vector<float>& keys, size_t n, size_t dim) {
    std::vector<std::pair<std::int32_t, size_t>> order;
    for (size_t e = 0; e < n; ++e) {
      order.emplace_back(at.cache.head(at.slot, kv_head).position(static_cast<int>(e)), e);
    }
    std::sort(order.begin(), order.end());
    std::vector<double> mean(dim, 0.0);
    for (const auto& [position, e] : order) {
      for (size_t c = 0; c < dim; ++c) mean[c] += keys[e * dim + c];
    }
    for (double& x : mean) x /= static_cast<double>(n);
    return mean;
  }
};

}  // namespace

std::unique_ptr<host_rule> keydiff_rule(const policies::policy&, const kernels::cache_shape&) {
  return std::make_unique<rule>();
}

}  // namespace kvreplay::replay
