// row_basics: what a row says in every mode: whose it is, what everything kept would have cost,
// what is said in its note.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "kernels/kv_cache.hpp"
#include "policies/budget.hpp"
#include "policies/policy.hpp"
#include "reports/result.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

// In the note of closed-loop rows of --kv-dtype fp32.
inline constexpr const char* fp32_note = "caches in FP32 (--kv-dtype fp32)";

void add_note(reports::result& row, const std::string& text);

// Trace, policy, tokens. `layers`: how many take part; skip: decode steps left out of the metrics.
void describe_row(const traces::reader& trace, int sequence, const policies::policy& policy,
                  int layers, std::int64_t skip, const char* mode, reports::result& row);

// Payload of everything kept in FP16, windowed layers their window only.
std::int64_t full_bytes(const kernels::cache_shape& shape, std::int64_t positions);

// The mean entries above which a gated policy counts as loose; below 0 for ungated ones. The last
// step's share stands for all: percentages grow, and the largest is the fair limit.
double loose_entries(const policies::policy& policy, const policies::budget_plan& plan,
                     std::span<const int> layers, std::int64_t last_step);

}  // namespace kvreplay::replay
