// knorm: minus the Euclidean norm of the key (arXiv 2406.11430).
#include <cmath>

#include "kernels/entry_rows.hpp"
#include "replay/host_rule.hpp"

namespace kvreplay::replay {
namespace {

class rule final : public cloned_rule<rule> {
 public:
  void worth(const rule_context& at, int kv_head, std::vector<float>& out) override {
    const auto dim = static_cast<size_t>(at.cache.shape().head_dim);
    const auto keys = kernels::entry_keys(at.cache, at.slot, kv_head);
    out.clear();
    for (size_t begin = 0; begin < keys.size(); begin += dim) {
      double sum = 0;
      for (size_t c = 0; c < dim; ++c) {
        sum += static_cast<double>(keys[begin + c]) * keys[begin + c];
      }
      out.push_back(static_cast<float>(-std::sqrt(sum)));
    }
  }
};

}  // namespace

std::unique_ptr<host_rule> knorm_rule(const policies::policy&, const kernels::cache_shape&) {
  return std::make_unique<rule>();
}

}  // namespace kvreplay::replay
