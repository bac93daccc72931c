// attend_recorded: a step's mass from recorded attention, where a trace has no keys.
#pragma once

#include <cstdint>

#include "kernels/attend.hpp"
#include "kernels/kv_cache.hpp"

namespace kvreplay::replay {

// The probabilities that a step's cache would have given its entries: the recorded row over the
// positions held, renormalised, with the learned sink's share (what the recorded row lacks to 1)
// where the model has sinks. rows [q_heads, stride] of the full cache; mass [kv_heads, mass_stride]
// in entry order. A row that is 0 on all that is held gives 0.
void attend_recorded(const kernels::kv_cache& cache, int slot, const float* rows,
                     std::int64_t stride, kernels::mass_layout layout, float* mass,
                     std::int64_t mass_stride);

}  // namespace kvreplay::replay
