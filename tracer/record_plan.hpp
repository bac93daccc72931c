// What a recording will hold, decided before it starts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tracer/record.hpp"
#include "traces/writer.hpp"

namespace kvreplay::tracer {

struct record_plan {
  traces::model_info model;
  traces::sequence_plan sequence;
};

// Checks the options against the model (layers, prompt length, token ids, position limit, block and
// flush sizes) and lays out the file. Throws model_error.
record_plan plan_recording(const model_config& config, const record_options& options);

// Throws model_error where a folder with `available` bytes has no room for `projected` and 5 %
// more.
void require_space(const std::string& path, std::int64_t projected, std::uint64_t available);

}  // namespace kvreplay::tracer
