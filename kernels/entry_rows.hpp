// entry_rows: keys and values of a head as attention sees them, out of whatever precision they are
// stored in.
#pragma once

#include <vector>

#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

// [entries, head_dim] and [entries, value_dim], the body's entries first, then the tail's
// (kv_cache.hpp).
std::vector<float> entry_keys(const kv_cache& cache, int layer, int kv_head);
std::vector<float> entry_values(const kv_cache& cache, int layer, int kv_head);

}  // namespace kvreplay::kernels
