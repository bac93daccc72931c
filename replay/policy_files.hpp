// policy_files: what a SPEC names by file: the head table of headkv, the sets of kept.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "policies/kept_sets.hpp"
#include "policies/policy.hpp"

namespace kvreplay::replay {

// The policy with its files read, for a model of so many layers and heads and one sequence of a
// trace. Policies without files come back as they are. Throws traces::trace_error (one line that
// names the file and what is wrong with it).
policies::policy with_files(const policies::policy& policy, int n_layers, int q_heads, int kv_heads,
                            int sequence);

// HeadKV's shares from {"schema": "kvreplay.headscores/1", "scores": [layers][query heads]}: summed
// over the query heads of each KV head and normalised to sum 1: [layers * kv_heads].
std::vector<double> read_head_table(const std::string& path, int n_layers, int q_heads,
                                    int kv_heads);

// A CSV of the form that replay --kept writes (rows of other sequences are left out), of one
// policy.
policies::kept_sets read_kept_sets(const std::string& path, int sequence);

}  // namespace kvreplay::replay
