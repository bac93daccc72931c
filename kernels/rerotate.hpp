// rerotate: a layer's cache as in-cache positions see it (StreamingLLM, arXiv 2309.17453).
#pragma once

#include <cstdint>
#include <span>

#include "kernels/kv_cache.hpp"

namespace kvreplay::kernels {

// True where in-cache positions differ from the true ones by more than a common shift: entries have
// left between others that stay.
bool has_gaps(const kv_cache& cache, int layer);

// Layer `layer` as the only layer of a cache in FP32. Entries keep their order. Each key is turned
// from its position to the one at which it stands as far before the newest entry as there are
// entries between them, so that a query rotated at the newest entry's true position sees in-cache
// distances. Keys that move by 0 keep their bits. inv_freq [rope_dim / 2].
// Throws std::invalid_argument where the shape has no rotary pairs or inv_freq does not fit them.
kv_cache rerotated(const kv_cache& cache, int layer, std::span<const double> inv_freq);

}  // namespace kvreplay::kernels
