// trimkv: (age + age_offset) log beta, age = t - position (arXiv 2512.03324).
#include <cmath>
#include <stdexcept>

#include "replay/host_rule.hpp"

namespace kvreplay::replay {
namespace {

class rule final : public cloned_rule<rule> {
 public:
  explicit rule(const policies::score_rule& score) : score_(score) {}

  void worth(const rule_context& at, int kv_head, std::vector<float>& out) override {
    const auto& store = at.cache.head(at.slot, kv_head);
    const std::int64_t heads = at.cache.shape().kv_heads;
    if (std::ssize(at.inputs.retention) < (at.step + 1) * heads) {
      throw std::invalid_argument("trimkv: no retention for every position up to the step");
    }
    out.clear();
    for (int e = 0; e < store.size(); ++e) {
      const std::int64_t position = store.position(e);
      const double log_beta = at.inputs.retention[static_cast<size_t>(position * heads + kv_head)];
      const double age = static_cast<double>(at.step - position) + score_.age_offset;
      const double worth = age * log_beta;
      out.push_back(static_cast<float>(score_.exponential ? std::exp(worth) : worth));
    }
  }

 private:
  policies::score_rule score_;
};

}  // namespace

std::unique_ptr<host_rule> trimkv_rule(const policies::policy& policy,
                                       const kernels::cache_shape&) {
  return std::make_unique<rule>(policy.score);
}

}  // namespace kvreplay::replay
