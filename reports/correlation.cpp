#include "reports/correlation.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>

namespace kvreplay::reports {

double pearson(std::span<const double> x, std::span<const double> y) {
  const auto n = static_cast<double>(x.size());
  const double mx = std::accumulate(x.begin(), x.end(), 0.0) / n;
  const double my = std::accumulate(y.begin(), y.end(), 0.0) / n;
  double xy = 0, xx = 0, yy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xy += (x[i] - mx) * (y[i] - my);
    xx += (x[i] - mx) * (x[i] - mx);
    yy += (y[i] - my) * (y[i] - my);
  }
  if (!(xx > 0) || !(yy > 0)) return std::numeric_limits<double>::quiet_NaN();
  return xy / std::sqrt(xx) / std::sqrt(yy);
}

std::vector<double> ranks_of(std::span<const double> x) {
  std::vector<std::size_t> order(x.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return x[a] < x[b]; });
  std::vector<double> ranks(x.size());
  for (std::size_t i = 0; i < order.size();) {
    std::size_t end = i;
    while (end < order.size() && x[order[end]] == x[order[i]]) ++end;
    const double mean = 0.5 * static_cast<double>(i + end + 1);
    for (; i < end; ++i) ranks[order[i]] = mean;
  }
  return ranks;
}

double spearman(std::span<const double> x, std::span<const double> y) {
  return pearson(ranks_of(x), ranks_of(y));
}

double kendall(std::span<const double> x, std::span<const double> y) {
  std::int64_t agree = 0, tied_x = 0, tied_y = 0, pairs = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    for (std::size_t j = i + 1; j < x.size(); ++j) {
      const int a = (x[i] < x[j]) - (x[i] > x[j]), b = (y[i] < y[j]) - (y[i] > y[j]);
      ++pairs;
      tied_x += a == 0 ? 1 : 0;
      tied_y += b == 0 ? 1 : 0;
      agree += a * b;
    }
  }
  const double scale = std::sqrt(static_cast<double>(pairs - tied_x)) *
                       std::sqrt(static_cast<double>(pairs - tied_y));
  if (!(scale > 0)) return std::numeric_limits<double>::quiet_NaN();
  return static_cast<double>(agree) / scale;
}

}  // namespace kvreplay::reports
