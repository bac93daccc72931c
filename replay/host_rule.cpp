#include "replay/host_rule.hpp"

namespace kvreplay::replay {

std::unique_ptr<host_rule> make_host_rule(const policies::policy& policy,
                                          const kernels::cache_shape& shape) {
  switch (policy.score.kind) {
    case policies::score_kind::history:
      return scissorhands_rule(policy, shape);
    case policies::score_kind::observed:
      return snapkv_rule(policy, shape);
    case policies::score_kind::redundancy:
      return rkv_rule(policy, shape);
    case policies::score_kind::retention:
      return trimkv_rule(policy, shape);
    case policies::score_kind::future:
      return oracle_rule(policy, shape);
    case policies::score_kind::key_norm:
      return knorm_rule(policy, shape);
    case policies::score_kind::key_difference:
      return keydiff_rule(policy, shape);
    case policies::score_kind::position:
    case policies::score_kind::hash:
    case policies::score_kind::sum:
    case policies::score_kind::last:
    case policies::score_kind::ema:
    case policies::score_kind::given:
    case policies::score_kind::image:
      return nullptr;
  }
  return nullptr;
}

}  // namespace kvreplay::replay
