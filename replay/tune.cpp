#include "replay/tune.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "reports/pareto.hpp"

namespace kvreplay::replay {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double first_share = 0.25;  // of the steps, for the lattice
constexpr double lattice_part = 0.4;  // of the evaluations
constexpr size_t starts = 8;          // points whose neighbours are tried

// A point: which grid, and its value on every axis.
struct grid_point {
  size_t grid = 0;
  std::vector<int> index;
  bool operator<(const grid_point& o) const {
    return std::pair(grid, index) < std::pair(o.grid, o.index);
  }
};

class search {
 public:
  search(std::span<const policies::spec_grid> grids, const tune_goal& goal,
         const tune_options& options, const tune_evaluator& evaluate)
      : grids_(grids), goal_(goal), options_(options), evaluate_(evaluate) {
    for (const auto& grid : grids) total_ += grid.size();
  }

  tuned run();

 private:
  std::vector<grid_point> all_points() const;
  std::vector<grid_point> lattice(size_t grid, std::int64_t most);
  std::vector<grid_point> better_third(const std::vector<grid_point>& points);
  void refine();
  std::vector<grid_point> untried_near(const grid_point& of) const;
  bool halve_strides(size_t grid);
  std::vector<reports::result> run_batch(std::span<const grid_point> points, double share);
  void run_all(const std::vector<grid_point>& points);
  std::vector<grid_point> order() const;
  std::int64_t left() const { return options_.evaluations - used_; }

  std::span<const policies::spec_grid> grids_;
  const tune_goal& goal_;
  const tune_options& options_;
  const tune_evaluator& evaluate_;
  std::int64_t total_ = 0, used_ = 0;
  std::map<size_t, std::vector<int>> strides_;  // of each grid's axes
  std::map<grid_point, reports::result> rows_;  // on all steps
};

std::vector<grid_point> search::all_points() const {
  std::vector<grid_point> out;
  for (size_t g = 0; g < grids_.size(); ++g) {
    for (std::int64_t i = 0; i < grids_[g].size(); ++i) out.push_back({g, grids_[g].index_of(i)});
  }
  return out;
}

// Every stride-th value of each axis and its last one; the axis with most points left is thinned
// until at most `most` points remain.
std::vector<grid_point> search::lattice(size_t g, std::int64_t most) {
  const auto axes = grids_[g].axes();
  auto& strides = strides_[g];
  strides.assign(axes.size(), 1);
  const auto picks = [&](size_t a) {
    std::vector<int> out;
    const auto count = static_cast<int>(axes[a].values.size());
    for (int i = 0; i < count; i += strides[a]) out.push_back(i);
    if (out.back() != count - 1) out.push_back(count - 1);
    return out;
  };
  while (true) {
    std::int64_t product = 1;
    size_t widest = 0, most_picks = 0;
    for (size_t a = 0; a < axes.size(); ++a) {
      const auto n = picks(a).size();
      product *= static_cast<std::int64_t>(n);
      if (n > most_picks) {
        most_picks = n;
        widest = a;
      }
    }
    if (product <= most || most_picks <= 2) break;
    strides[widest] *= 2;
  }
  std::vector<grid_point> out(1);
  out.front().grid = g;
  out.front().index.resize(axes.size());
  for (size_t a = 0; a < axes.size(); ++a) {
    std::vector<grid_point> wider;
    for (const auto& point : out) {
      for (const int i : picks(a)) {
        wider.push_back(point);
        wider.back().index[a] = i;
      }
    }
    out = std::move(wider);
  }
  if (std::ssize(out) > most) out.resize(static_cast<size_t>(std::max<std::int64_t>(1, most)));
  return out;
}

std::vector<reports::result> search::run_batch(std::span<const grid_point> points, double share) {
  std::vector<std::string> specs;
  for (const auto& point : points) specs.push_back(grids_[point.grid].spec(point.index));
  used_ += std::ssize(points);
  return evaluate_(specs, share);
}

void search::run_all(const std::vector<grid_point>& points) {
  std::vector<grid_point> fresh;
  for (const auto& point : points) {
    if (!rows_.contains(point) && std::ssize(fresh) < left()) fresh.push_back(point);
  }
  for (size_t first = 0; first < fresh.size(); first += static_cast<size_t>(options_.batch)) {
    const auto count = std::min(fresh.size() - first, static_cast<size_t>(options_.batch));
    const std::span part(&fresh[first], count);
    auto rows = run_batch(part, 1);
    for (size_t i = 0; i < count; ++i) rows_[part[i]] = std::move(rows[i]);
  }
}

// Successive halving: the lattice on the first part of the steps, ordered there.
std::vector<grid_point> search::better_third(const std::vector<grid_point>& points) {
  std::vector<std::pair<reports::result, grid_point>> seen;
  for (size_t first = 0; first < points.size(); first += static_cast<size_t>(options_.batch)) {
    const auto count = std::min(points.size() - first, static_cast<size_t>(options_.batch));
    auto rows = run_batch({&points[first], count}, first_share);
    for (size_t i = 0; i < count; ++i) seen.emplace_back(std::move(rows[i]), points[first + i]);
  }
  std::stable_sort(seen.begin(), seen.end(), [this](const auto& a, const auto& b) {
    return better(goal_, a.first, b.first);
  });
  std::vector<grid_point> out;
  for (size_t i = 0; i < (seen.size() + 2) / 3; ++i) out.push_back(seen[i].second);
  return out;
}

std::vector<grid_point> search::order() const {
  std::vector<grid_point> out;
  for (const auto& [point, row] : rows_) out.push_back(point);
  std::stable_sort(out.begin(), out.end(), [this](const auto& a, const auto& b) {
    return better(goal_, rows_.at(a), rows_.at(b));
  });
  return out;
}

// Untried points one stride away: along each axis, or, where those are all known, along two axes in
// opposite directions: a limit couples them, and the way along it is diagonal.
std::vector<grid_point> search::untried_near(const grid_point& of) const {
  const auto axes = grids_[of.grid].axes();
  const auto& strides = strides_.at(of.grid);
  std::set<grid_point> straight, diagonal;
  const auto moved = [&](grid_point p, size_t a, int direction) {
    const int last = static_cast<int>(axes[a].values.size()) - 1;
    p.index[a] = std::clamp(p.index[a] + direction * strides[a], 0, last);
    return p;
  };
  for (size_t a = 0; a < axes.size(); ++a) {
    for (const int direction : {-1, 1}) {
      const auto one = moved(of, a, direction);
      if (!rows_.contains(one)) straight.insert(one);
      for (size_t b = 0; b < axes.size(); ++b) {
        const auto two = moved(one, b, -direction);
        if (b != a && !rows_.contains(two)) diagonal.insert(two);
      }
    }
  }
  const auto& out = straight.empty() ? diagonal : straight;
  return {out.begin(), out.end()};
}

bool search::halve_strides(size_t grid) {
  bool any = false;
  for (int& stride : strides_[grid]) {
    any = any || stride > 1;
    stride = std::max(1, stride / 2);
  }
  return any;
}

// Around the best point until nothing near it is untried at any stride, then around the next: with
// a limit in the way the best point can be a corner that single steps do not leave.
void search::refine() {
  while (left() > 0) {
    const auto ranked = order();
    bool tried = false;
    for (size_t i = 0; i < std::min(ranked.size(), starts) && !tried; ++i) {
      const auto fresh = untried_near(ranked[i]);
      tried = !fresh.empty();
      if (tried) {
        run_all(fresh);
      } else if (i == 0) {
        tried = halve_strides(ranked[i].grid);
      }
    }
    if (!tried) return;
  }
}

tuned search::run() {
  if (total_ <= options_.evaluations) {
    run_all(all_points());
  } else {
    std::vector<grid_point> coarse;
    const auto share =
        static_cast<std::int64_t>(lattice_part * static_cast<double>(options_.evaluations) /
                                  static_cast<double>(grids_.size()));
    for (size_t g = 0; g < grids_.size(); ++g) {
      for (auto& point : lattice(g, std::max<std::int64_t>(1, share))) {
        if (std::ssize(coarse) < options_.evaluations) coarse.push_back(std::move(point));
      }
    }
    run_all(better_third(coarse));
    refine();
  }
  tuned out;
  for (const auto& point : order()) out.rows.push_back(rows_.at(point));
  out.evaluations = used_;
  out.points = total_;
  return out;
}

}  // namespace

double violation_of(const tune_goal& goal, const reports::result& row) {
  if (row.status != "ok") return infinity;
  const auto above = [&](const reports::maybe& number) {
    if (!number) return infinity;
    return std::max(0.0, (*number - goal.value) / std::max(std::fabs(goal.value), 1e-300));
  };
  switch (goal.limit) {
    case tune_limit::max_bytes:
      return above(row.memory.mean_bytes);
    case tune_limit::max_ratio:
      return above(row.memory.memory_ratio);
    case tune_limit::max_kl:
      return above(row.quality.logit_kl);
    case tune_limit::min_recall:
      if (!row.quality.attention_recall) return infinity;
      return std::max(0.0, goal.value - *row.quality.attention_recall);
  }
  return infinity;
}

double loss_of(const tune_goal& goal, const reports::result& row) {
  const bool memory_bound =
      goal.limit == tune_limit::max_bytes || goal.limit == tune_limit::max_ratio;
  if (!memory_bound) return row.memory.mean_bytes.value_or(infinity);
  const auto quality = reports::quality_of(row, goal.quality);
  if (!quality) return infinity;
  return reports::higher_is_better(goal.quality) ? -*quality : *quality;
}

bool better(const tune_goal& goal, const reports::result& a, const reports::result& b) {
  const double va = violation_of(goal, a), vb = violation_of(goal, b);
  if (va != vb) return va < vb;
  const double la = loss_of(goal, a), lb = loss_of(goal, b);
  if (la != lb) return la < lb;
  return a.memory.mean_bytes.value_or(infinity) < b.memory.mean_bytes.value_or(infinity);
}

tuned tune(std::span<const policies::spec_grid> grids, const tune_goal& goal,
           const tune_options& options, const tune_evaluator& evaluate) {
  return search(grids, goal, options, evaluate).run();
}

}  // namespace kvreplay::replay
