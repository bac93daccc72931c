// oracle: the attention that the recorded run gives an entry in all steps to come.
#include <stdexcept>

#include "replay/bind.hpp"
#include "replay/future_mass.hpp"
#include "replay/host_rule.hpp"

namespace kvreplay::replay {
namespace {

class rule final : public cloned_rule<rule> {
 public:
  explicit rule(kernels::mass_layout layout) : layout_(layout) {}

  void worth(const rule_context& at, int kv_head, std::vector<float>& out) override {
    if (at.inputs.future == nullptr) {
      throw std::invalid_argument("oracle: no attention of the recorded run");
    }
    const auto& store = at.cache.head(at.slot, kv_head);
    const auto row = at.inputs.future->row(at.step, layout_, kv_head);
    out.clear();
    for (int e = 0; e < store.size(); ++e) {
      out.push_back(row[static_cast<size_t>(store.position(e))]);
    }
  }

 private:
  kernels::mass_layout layout_;
};

}  // namespace

std::unique_ptr<host_rule> oracle_rule(const policies::policy& policy,
                                       const kernels::cache_shape&) {
  return std::make_unique<rule>(layout_of(policy.score));
}

}  // namespace kvreplay::replay
