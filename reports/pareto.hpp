// pareto: which rows nobody beats in bytes and quality at once, and which quality that is.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reports/result.hpp"

namespace kvreplay::reports {

// True for a metric of which more is better (recall, agreement ...), by its name in `quality`.
bool higher_is_better(std::string_view metric);

// The number `quality.<metric>` of a row; empty where there is none of that name.
maybe quality_of(const result& row, std::string_view metric);

// The first of logit_kl, kl_proxy, residual_rel_l2, output_rel_l2 and attention_recall that every
// good row has; empty where there is none.
std::string_view common_quality(std::span<const result> rows);

// The same over the good rows that were scored at all; where no metric has all of them, the one
// that most have; empty where nothing was scored. For reports that mix modes.
std::string_view ranking_metric(std::span<const result> rows);

// True for rows on the front of mean_bytes against the metric: see mark_pareto.
std::vector<bool> pareto_front(std::span<const result> rows, std::string_view metric);

// Sets `pareto` to 1 or 0 in every good row that has mean_bytes and the metric: 1 where no other
// such row has at most its bytes and at least its quality and is better in one of them. Rows of
// different trace, sequence or mode do not compare.
void mark_pareto(std::span<result> rows, std::string_view metric);

}  // namespace kvreplay::reports
