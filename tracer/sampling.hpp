// Choosing the next token of a free-running recording.
#pragma once

#include <cstdint>
#include <span>

namespace kvreplay::tracer {

// A number in [0, 1) that depends on seed and position alone: SplitMix64's finaliser (Steele, Lea
// and Flood, OOPSLA 2014) applied to seed, then to that plus the position; top 53 bits.
double uniform_at(std::uint64_t seed, std::int64_t position);

// Token id from logits [vocab_size]. Temperature 0: the largest logit, the lower id of equal ones.
// Else softmax(logits / temperature), summed in double in the order of ids; the first id whose
// cumulative sum exceeds `uniform` times the total.
std::int32_t choose_token(std::span<const float> logits, double temperature, double uniform);

}  // namespace kvreplay::tracer
