// model_match: is a model the one that a trace was recorded with?
#pragma once

#include "tracer/model.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {

// Throws traces::trace_error, one line, for the first size, window or token that differs, or for
// another checkpoint of the same shape (by fingerprint, where the trace has one).
void require_same_model(const traces::reader& trace, int sequence, const tracer::model& model);

}  // namespace kvreplay::replay
