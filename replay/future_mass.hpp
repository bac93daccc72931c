// future_mass: for every step of a layer, the attention that each position will get from the steps
// after it in the recorded run. What `oracle` ranks by; it reads the future and says so.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "kernels/attend.hpp"
#include "kernels/kv_cache.hpp"
#include "replay/layer_data.hpp"

namespace kvreplay::replay {

class future_mass {
 public:
  // `shape` holds this one layer as its layer 0; both must outlive the object. Sums over all decode
  // steps for each of `layouts`, in fixed point (2^-40), so that taking a step off them is exact.
  // Memory: [layouts, kv_heads, T].
  future_mass(const kernels::cache_shape& shape, const layer_data& data,
              std::span<const kernels::mass_layout> layouts);

  // Makes row() answer for steps first - 1 .. first + steps - 1. Blocks come in order, the first
  // begins at P.
  void load(std::int64_t first, std::int64_t steps);

  // Sum over steps > `step` of the group's reduced probability, positions 0 .. step.
  std::span<const float> row(std::int64_t step, kernels::mass_layout layout, int kv_head) const;

 private:
  struct sums {
    std::vector<std::int64_t> left;  // [kv_heads, T], of the steps after the last one loaded
    std::vector<float> rows;         // [steps + 1, kv_heads, stride]
  };
  void add_rows(std::int64_t first, std::int64_t steps, std::int64_t sign);

  const kernels::cache_shape* shape_;
  const layer_data* data_;
  std::map<kernels::mass_layout, sums> by_layout_;
  std::int64_t first_ = 0, steps_ = 0;  // of the loaded rows
};

}  // namespace kvreplay::replay
