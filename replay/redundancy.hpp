// redundancy: how much of what a key says others say as well (R-KV).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace kvreplay::replay {

// keys [n, dim] in ascending order of position -> [n], sum 1: the softmax over keys j of the mean
// over i of cos(k_i, k_j), with cos(k_i, k_i) = 0 and, for each i, 0 for the newest j with a cosine
// above 0.5. Key norms are guarded by 1e-8 as in the published code.
std::vector<double> redundancies(std::span<const float> keys, std::size_t dim);

}  // namespace kvreplay::replay
