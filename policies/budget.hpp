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
  std::vector<int> window;          // [n_layers], 0 = global; empty = all global
  std::vector<int> recorded_layers; // whose bytes a budget in bytes counts; empty = all
};

struct protection {
  int sinks = 0, recent = 0;
};

// A policy's budgets resolved against a model. Copyable, immutable, cheap to ask.
class budget_plan {
 public:
  // Throws spec_error where the numbers cannot fit (a pyramid whose total is too small for the
  // protected part, a budget in bytes below one entry a head, confkv's high < recent).
  budget_plan(const policy& p, const model_dims& dims);

  // Entries (layer, head) may hold after step t, 0-based t, held counted with the newcomer.
  // `layer` is the model's. INT_MAX: everything. With a gate: max(b, min(low, held - shrink)).
  int budget(std::int64_t step, int layer, int kv_head, int held, bool tight) const;

  // What is protected under a budget (h2o's recent follows it).
  protection protect(int budget) const;

  // True when selection runs after step t (t = P-1 always).
  bool selects(std::int64_t step, std::int64_t n_prompt) const;

  // The sum and the largest value that `budget` may take at `tight`, for reports.
  int share(std::int64_t step, int layer, bool tight) const;

 private:
  policy policy_;
  model_dims dims_;
  std::int64_t single_entries_ = 0;  // bytes budgets, resolved to entries
  std::int64_t high_entries_ = 0, low_entries_ = 0;
};

// Layer shares of a pyramid: falling linearly from (2 - 1/beta) B to B / beta, whole numbers by
// largest remainder (ties: lower layer), sum exactly round(total * L * B), none below `least`
// (POLICIES, `pyramid`); L = 1: the share is B. exact = false: the floor-step progression of
// PyramidKV's published code. Throws spec_error.
std::vector<int> pyramid_shares(int layers, std::int64_t budget, const pyramid_rule& rule, int least);

}  // namespace kvreplay::policies
