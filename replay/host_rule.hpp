// host_rule: a score that no kernel keeps. What a lane's entries are worth is computed on the host,
// from the cache, the layer's inputs and whatever the rule remembers of earlier steps.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attend.hpp"
#include "kernels/kv_cache.hpp"
#include "policies/policy.hpp"
#include "replay/layer_data.hpp"
#include "replay/layer_inputs.hpp"

namespace kvreplay::replay {

// Where a rule is asked. `step` is t, the newest position that the cache holds.
struct rule_context {
  const kernels::kv_cache& cache;
  int slot = 0;
  std::int64_t step = 0;
  const layer_inputs& inputs;
};

// What a step's attention left: mass [kv_heads, stride] in entry order (null: the rule asked for
// none), the step's queries [q_heads, head_dim] (null where a trace has none).
struct step_view {
  const float* mass = nullptr;
  std::int64_t stride = 0;
  const float* q = nullptr;
};

// The rule of one layer of one lane. Its state is part of the lane's snapshot; it reads rows <= t
// only, unless its policy declares the future.
class host_rule {
 public:
  virtual ~host_rule() = default;
  virtual std::unique_ptr<host_rule> clone() const = 0;

  // The prompt is in the cache, nothing has left it yet.
  virtual void see_prompt(const rule_context&, const layer_data&, prompt_observations&) {}
  // A step has attended, nothing has left since.
  virtual void see_step(const rule_context&, const step_view&) {}
  // Scores of a head's entries, in entry order; higher stays. Never NaN.
  virtual void worth(const rule_context&, int kv_head, std::vector<float>& out) = 0;
  // What the rule remembers, for policy_state_bytes.
  virtual std::int64_t state_bytes() const { return 0; }
};

// A rule that copies with its lane.
class rule_ptr {
 public:
  rule_ptr() = default;
  explicit rule_ptr(std::unique_ptr<host_rule> rule) : rule_(std::move(rule)) {}
  rule_ptr(const rule_ptr& other) : rule_(other.rule_ ? other.rule_->clone() : nullptr) {}
  rule_ptr(rule_ptr&&) noexcept = default;
  rule_ptr& operator=(rule_ptr other) noexcept {
    rule_ = std::move(other.rule_);
    return *this;
  }
  ~rule_ptr() = default;
  host_rule* get() const { return rule_.get(); }

 private:
  std::unique_ptr<host_rule> rule_;
};

// A rule over `Rule`'s own copy constructor.
template <class Rule>
class cloned_rule : public host_rule {
 public:
  std::unique_ptr<host_rule> clone() const override {
    return std::make_unique<Rule>(static_cast<const Rule&>(*this));
  }
};

// The rule of one layer, or none where the kernels keep the score. Each is defined in the file of
// its name, rule_NAME.cpp.
std::unique_ptr<host_rule> make_host_rule(const policies::policy& policy,
                                          const kernels::cache_shape& shape);

std::unique_ptr<host_rule> scissorhands_rule(const policies::policy&, const kernels::cache_shape&);
std::unique_ptr<host_rule> snapkv_rule(const policies::policy&, const kernels::cache_shape&);
std::unique_ptr<host_rule> rkv_rule(const policies::policy&, const kernels::cache_shape&);
std::unique_ptr<host_rule> trimkv_rule(const policies::policy&, const kernels::cache_shape&);
std::unique_ptr<host_rule> oracle_rule(const policies::policy&, const kernels::cache_shape&);
std::unique_ptr<host_rule> knorm_rule(const policies::policy&, const kernels::cache_shape&);
std::unique_ptr<host_rule> keydiff_rule(const policies::policy&, const kernels::cache_shape&);

}  // namespace kvreplay::replay
