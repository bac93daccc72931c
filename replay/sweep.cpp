#include "replay/sweep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>

#include "policies/grid.hpp"
#include "replay/closed_loop.hpp"
#include "replay/ranks.hpp"
#include "replay/row_lines.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

// One sequence of one trace in one mode, with what was known of it.
struct swept_sequence {
  std::string trace, fingerprint;
  int sequence = 0;
  std::string unreadable;  // why nothing of it can be run
  std::int64_t n_decode = 0;
  std::string mode = "open";
};

reports::result failed_row(const swept_sequence& where, const sweep_point& point, std::string why) {
  reports::result row;
  row.trace = where.trace;
  row.sequence = where.sequence;
  row.mode = where.mode;
  row.policy = point.resolved();
  row.name = row.policy.substr(0, row.policy.find_first_of(":+"));
  if (point.policy) {
    row.params = point.policy->params;
    row.precision = point.policy->precision_name;
  }
  row.status = "failed";
  row.note = std::move(why);
  return row;
}

// A batch of points on one sequence: the unit that ranks take.
struct sweep_unit {
  size_t sequence = 0;
  std::vector<size_t> points;
};

class sweep_run {
 public:
  sweep_run(std::span<const std::string> traces, std::span<const sweep_point> points,
            const sweep_options& options)
      : points_(points), options_(options) {
    for (const auto& trace : traces) find_sequences(trace, traces.size() == 1);
    rows_.resize(sequences_.size() * points_.size());
    find_known();
    make_units();
  }

  std::vector<reports::result> run();

 private:
  void find_sequences(const std::string& path, bool only);
  std::optional<reports::result> known_row(const swept_sequence& where,
                                           const sweep_point& point) const;
  void find_known();
  std::vector<lane_output> replay(const swept_sequence& where,
                                  std::span<const policies::policy> policies) const;
  void make_units();
  std::string work(const sweep_unit& unit);
  void take(const sweep_unit& unit, const std::string& lines);
  size_t place(size_t sequence, size_t point) const { return sequence * points_.size() + point; }

  std::span<const sweep_point> points_;
  const sweep_options& options_;
  std::vector<swept_sequence> sequences_;
  std::vector<std::optional<reports::result>> rows_;  // [sequences, points]
  std::vector<std::uint8_t> done_;                    // [sequences, points], equal on every rank
  std::vector<sweep_unit> units_;
  std::int64_t finished_ = 0;
  // The trace of the last unit stays open: units come in its order.
  std::string open_path_;
  std::unique_ptr<traces::reader> open_;
};

void sweep_run::find_sequences(const std::string& path, bool only) {
  try {
    const traces::reader trace(path, {.recover = options_.recover});
    for (const auto& s : trace.sequences()) {
      const swept_sequence found{path, trace.fingerprint(s.id), s.id, {}, s.n_decode()};
      if (options_.model == nullptr || options_.also_open) sequences_.push_back(found);
      if (options_.model == nullptr) continue;
      sequences_.push_back(found);
      sequences_.back().mode = "closed";
    }
  } catch (const traces::trace_error& e) {
    if (only) throw;
    sequences_.push_back({path, {}, 0, e.what(), 0});
  }
}

std::optional<reports::result> sweep_run::known_row(const swept_sequence& where,
                                                    const sweep_point& point) const {
  const bool closed = where.mode == "closed";
  // A closed row scores tokens, and the last position has none to predict.
  const auto scored = where.n_decode - options_.open.skip - (closed ? 1 : 0);
  for (const auto& known : options_.known) {
    if (known.status == "ok" && known.policy == point.resolved() &&
        known.sequence == where.sequence && known.mode == where.mode &&
        known.trace_fingerprint == where.fingerprint && known.tokens.scored == scored &&
        (closed || known.quality.recall_bound.has_value() == options_.open.bound)) {
      return known;
    }
  }
  return std::nullopt;
}

// Rank 0 alone has read the journal; the others need to know which points are left.
void sweep_run::find_known() {
  std::string done(rows_.size(), '0');
  for (size_t s = 0; s < sequences_.size(); ++s) {
    for (size_t p = 0; p < points_.size(); ++p) {
      auto& row = rows_[place(s, p)];
      if (!sequences_[s].unreadable.empty()) {
        row = failed_row(sequences_[s], points_[p], sequences_[s].unreadable);
      } else if (!points_[p].policy) {
        row = failed_row(sequences_[s], points_[p], points_[p].complaint);
      } else {
        row = known_row(sequences_[s], points_[p]);
      }
      if (row) done[place(s, p)] = '1';
    }
  }
  done = broadcast(std::move(done));
  done_.assign(done.size(), 0);
  for (size_t i = 0; i < done.size(); ++i) done_[i] = done[i] == '1' ? 1 : 0;
}

// The first unit is one point, whose time tells what the rest will take.
void sweep_run::make_units() {
  const auto most = static_cast<size_t>(std::max<std::int64_t>(1, options_.batch_points));
  for (size_t s = 0; s < sequences_.size(); ++s) {
    sweep_unit unit{s, {}};
    for (size_t p = 0; p < points_.size(); ++p) {
      if (done_[place(s, p)] != 0) continue;
      unit.points.push_back(p);
      if (unit.points.size() < most && !units_.empty()) continue;
      units_.push_back(std::move(unit));
      unit = {s, {}};
    }
    if (!unit.points.empty()) units_.push_back(std::move(unit));
  }
}

std::vector<lane_output> sweep_run::replay(const swept_sequence& where,
                                           std::span<const policies::policy> policies) const {
  if (where.mode == "open") return replay_open(*open_, where.sequence, policies, options_.open);
  closed_loop_options closed;
  closed.skip = options_.open.skip;
  return replay_closed(*open_, where.sequence, *options_.model, policies, closed);
}

std::string sweep_run::work(const sweep_unit& unit) {
  const auto& where = sequences_[unit.sequence];
  if (open_path_ != where.trace) {
    open_ = std::make_unique<traces::reader>(where.trace,
                                             traces::open_options{.recover = options_.recover});
    open_path_ = where.trace;
  }
  std::vector<policies::policy> policies;
  for (const size_t p : unit.points) policies.push_back(*points_[p].policy);
  std::vector<reports::result> rows;
  try {
    for (auto& lane : replay(where, policies)) {
      rows.push_back(std::move(lane.row));
    }
  } catch (const std::exception& e) {
    rows.clear();
    for (const size_t p : unit.points) {
      rows.push_back(failed_row(where, points_[p], e.what()));
    }
  }
  return to_lines(rows);
}

void sweep_run::take(const sweep_unit& unit, const std::string& lines) {
  auto rows = from_lines(lines);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (options_.finished) options_.finished(rows[i]);
    rows_[place(unit.sequence, unit.points[i])] = std::move(rows[i]);
    ++finished_;
  }
}

std::vector<reports::result> sweep_run::run() {
  using clock = std::chrono::steady_clock;
  std::int64_t total = 0;
  for (const auto& unit : units_) total += std::ssize(unit.points);
  const auto at = [this](std::int64_t i) -> const sweep_unit& {
    return units_[static_cast<size_t>(i)];
  };
  const auto begin = clock::now();
  const bool root = this_rank().rank == 0;
  if (!units_.empty()) {
    if (root) {
      take(at(0), work(at(0)));
      if (options_.pilot && total > 1) {
        options_.pilot(std::chrono::duration<double>(clock::now() - begin).count(), total - 1);
      }
    }
    distribute(
        std::ssize(units_) - 1, [&](std::int64_t i) { return work(at(i + 1)); },
        [&](std::int64_t i, const std::string& lines) {
          take(at(i + 1), lines);
          if (options_.progress) options_.progress(finished_, total);
        });
  }
  std::vector<reports::result> out;
  if (!root) return out;
  for (auto& row : rows_) out.push_back(std::move(*row));
  return out;
}

}  // namespace

std::vector<sweep_point> sweep_points(std::span<const std::string> specs, std::int64_t& repeated) {
  std::vector<sweep_point> out;
  std::set<std::string> seen;
  repeated = 0;
  for (const auto& spec : specs) {
    const policies::spec_grid grid(spec);
    for (std::int64_t i = 0; i < grid.size(); ++i) {
      sweep_point point;
      point.spec = grid.spec(i);
      try {
        point.policy = policies::parse_policy(point.spec);
      } catch (const policies::spec_error& e) {
        point.complaint = e.what();
      }
      if (!seen.insert(point.resolved()).second) {
        ++repeated;
        continue;
      }
      out.push_back(std::move(point));
    }
  }
  return out;
}

std::vector<sweep_point> take_shard(const std::vector<sweep_point>& points, int shard, int of) {
  std::vector<sweep_point> out;
  for (size_t i = static_cast<size_t>(shard); i < points.size(); i += static_cast<size_t>(of)) {
    out.push_back(points[i]);
  }
  return out;
}

std::vector<reports::result> sweep(std::span<const std::string> traces,
                                   std::span<const sweep_point> points,
                                   const sweep_options& options) {
  return sweep_run(traces, points, options).run();
}

}  // namespace kvreplay::replay
