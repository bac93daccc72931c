// grid: a SPEC whose numeric parameters may be lists and ranges, as sweep and tune read it.
//   high=128/256/512       a list
//   tau=0.3..0.9..0.05     a range with its step, the end included: round((b - a) / s) + 1 values
//   recent=8..16           whole numbers, step 1
// Units go on every number: budget=10%..50%..10%, budget=1MiB/2MiB. Text and choices are left
// alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/policy.hpp"

namespace kvreplay::policies {

struct grid_axis {
  std::string name;                 // "tau", of a modifier "pyramid.beta"
  std::vector<std::string> values;  // as text, in the order given; at least two, all distinct
};

class spec_grid {
 public:
  // Throws spec_error for an unknown name or key, a range with step 0, of the wrong sign or of one
  // point, a value that stands twice, more than 100,000 points, and whatever parse_policy says of
  // the first point that no other point is free of.
  explicit spec_grid(std::string_view spec);

  std::span<const grid_axis> axes() const { return axes_; }
  std::int64_t size() const { return size_; }
  // SPEC number i of 0 .. size - 1; the last axis turns fastest.
  std::string spec(std::int64_t i) const;
  // The SPEC with value index[a] of axis a.
  std::string spec(std::span<const int> index) const;
  std::vector<int> index_of(std::int64_t i) const;
  std::int64_t number_of(std::span<const int> index) const;

 private:
  std::vector<std::string> fixed_;  // texts before, between and behind the axes
  std::vector<grid_axis> axes_;
  std::int64_t size_ = 1;
};

// The values of one list or range; a single one for plain text. `what` names it in errors.
std::vector<std::string> range_values(std::string_view text, std::string_view what);

}  // namespace kvreplay::policies
