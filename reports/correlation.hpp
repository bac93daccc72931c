// Correlations of two columns.
#pragma once

#include <span>
#include <vector>

namespace kvreplay::reports {

// Of finite values, as many in x as in y. Empty (NaN) where there are fewer than two pairs or one
// column is constant.
double pearson(std::span<const double> x, std::span<const double> y);
double spearman(std::span<const double> x, std::span<const double> y);  // equal values: mean rank
double kendall(std::span<const double> x, std::span<const double> y);   // tau-b

// Ranks from 1, equal values at the mean of theirs.
std::vector<double> ranks_of(std::span<const double> x);

}  // namespace kvreplay::reports
