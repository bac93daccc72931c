// full_reference: what the full cache says about a block of steps of one layer, computed once and
// shared by all policies: probability rows, the best possible recall, reference outputs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kv_cache.hpp"
#include "replay/layer_data.hpp"

namespace kvreplay::replay {

class full_reference {
 public:
  struct parts {
    bool rows = false;   // whole probability rows: O(context) per step
    bool bound = false;  // their best prefixes; needs rows
  };

  // `shape` holds this one layer as its layer 0; both must outlive the object. Rows are computed
  // also where the trace lacks o or lse; where it has attention alone they are read, and there is
  // no o and no lse.
  full_reference(const kernels::cache_shape& shape, const layer_data& data, parts wanted);

  // Steps [first, first + steps). Parallel over steps.
  void load(std::int64_t first, std::int64_t steps);

  bool has_rows() const { return wanted_.rows; }
  // A(t, h, .) over positions 0 .. t, absolute.
  std::span<const float> row(std::int64_t t, int q_head) const;
  // Rows of all query heads of a step, row_stride() apart.
  const float* rows(std::int64_t t) const {
    return &rows_[index(t, 0) * static_cast<size_t>(stride_)];
  }
  std::int64_t row_stride() const { return stride_; }
  double total(std::int64_t t, int q_head) const;  // sum over all visible i of A
  // Sum of the n largest entries of the row (n beyond the visible ones: all).
  double best(std::int64_t t, int q_head, std::int64_t n) const;
  const float* o(std::int64_t t) const;  // [q_heads, value_dim]
  float lse(std::int64_t t, int q_head) const;

 private:
  void sort_prefixes(std::int64_t t);
  void compute_output(std::int64_t t);
  size_t index(std::int64_t t, int q_head) const {
    return static_cast<size_t>((t - first_) * shape_->q_heads + q_head);
  }

  const kernels::cache_shape* shape_;
  const layer_data* data_;
  parts wanted_;
  std::int64_t first_ = 0, steps_ = 0, stride_ = 0;
  std::vector<float> rows_, prefixes_, o_, lse_;
  std::vector<double> totals_;
};

}  // namespace kvreplay::replay
