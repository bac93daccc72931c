// Budgets: how many entries a KV head may hold after step t. Pure functions of what they are given.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/policy.hpp"

namespace kvreplay::policies {

// The model as budgets see it. Layers are the model's, also where a trace has only some of them.
struct model_dims {
  int n_layers = 0, n_kv_heads = 0, head_dim = 0, value_dim = 0;
  std::vector<int> window;           // [n_layers], 0 = global; empty = all global
  std::vector<int> recorded_layers;  // whose bytes a budget in bytes counts; empty = all
};

struct protection {
  int sinks = 0, recent = 0;
};

// A policy's budgets resolved against a model. Copyable, immutable, cheap to ask.
class budget_plan {
 public:
  // Throws spec_error where the numbers cannot fit (a pyramid whose total is too small for the
  // protected part, a budget in bytes below one entry a head, confkv's high < recent), and
  // std::invalid_argument for dimensions that cannot be.
  budget_plan(const policy& p, const model_dims& dims);

  // Entries (layer, head) may hold after step t, 0-based t, held counted with the newcomer.
  // `layer` is the model's. INT_MAX: everything. With a gate: max(b, min(low, held - shrink)).
  // Where scores divide the budget (adaptive, global) this is a head's even part of it. Throws
  // spec_error only for a pyramid over a budget in percent that is too small at this step.
  int budget(std::int64_t step, int layer, int kv_head, int held, bool tight) const;

  // The same before a table divides it: what protection follows.
  int even_budget(std::int64_t step, int layer, int held, bool tight) const;

  // What is protected under a budget (h2o's recent follows it).
  protection protect(int budget) const;

  // True when selection runs after step t (t = P-1 always).
  bool selects(std::int64_t step, std::int64_t n_prompt) const;

  // What `budget` comes to at `tight` once shrinking is done: the layer's share of high or low (or
  // of the one number), for reports.
  int share(std::int64_t step, int layer, bool tight) const;

  // What is left of a budget once more than it was held: scissorhands drops many at once.
  std::int64_t target(std::int64_t budget) const;

  // A budget over all layers and heads at a step, division_kind::global.
  std::int64_t total(std::int64_t step, bool tight) const;

 private:
  // One number of the SPEC. Entries and bytes are resolved once; percent at every step.
  struct level {
    amount source;
    std::int64_t entries = 0;  // not used for percent
    std::vector<int> shares;   // [n_layers] under a pyramid; empty for percent
  };
  level resolve(const amount& a, const char* key) const;
  std::int64_t entries_at(const level& l, std::int64_t step) const;
  int layer_share(std::int64_t entries, const std::vector<int>& shares, int layer) const;
  int share_of(const level& l, std::int64_t step, int layer) const;
  bool shrinks() const;
  int shrunk(int budget, int low, int held) const;
  int head_share(int share, int layer, int kv_head) const;
  int fixed_protection() const;

  policy policy_;
  model_dims dims_;
  level single_, high_, low_;
  std::vector<int> middle_shares_;  // gate=constant under a pyramid
};

// Layer shares of a pyramid: falling linearly from (2 - 1/beta) B to B / beta, whole numbers by
// largest remainder (ties: lower layer), sum exactly round(total * L * B), none below `least`
// (POLICIES, `pyramid`); L = 1: the share is round(total * B). exact = false: the floor-step
// progression of PyramidKV's published code, whose sum is not exact and which only keeps `least`.
// With rule.window the shares are of what is left of the budget beside it, and it is added back.
// Throws spec_error where the sum cannot give every layer `least`.
std::vector<int> pyramid_shares(int layers, std::int64_t budget, const pyramid_rule& rule,
                                int least);

}  // namespace kvreplay::policies
