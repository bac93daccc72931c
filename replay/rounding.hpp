// rounding: q, k and v of a block as a 16-bit cache keeps them, as the recorder does it.
#pragma once

#include "tracer/model.hpp"

namespace kvreplay::replay {

void round_to_half(tracer::attention_block& block);

}  // namespace kvreplay::replay
