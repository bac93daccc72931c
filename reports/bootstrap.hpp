// Confidence intervals of means by the percentile bootstrap (Efron 1979).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace kvreplay::reports {

struct bootstrap_options {
  std::size_t resamples = 1000;
  double level = 0.95;
  std::size_t block = 64;         // positions that are drawn together within a sequence
  std::size_t min_sequences = 5;  // from here on whole sequences are drawn
  std::uint64_t seed = 20240607;
};

// Interval [low, high] of the mean over all values. sequences[s] holds one value per scored
// position, in order. With min_sequences or more that are not empty, whole sequences are drawn with
// replacement; else blocks of neighbouring positions (the last of a sequence may be shorter, none
// spans two): neighbouring positions depend on each other. Ends are the nearest ranks of the
// resampled means. Every value weighs the same.
//
// Nothing where fewer than two units can be drawn or a value is not finite. Depends on nothing but
// its arguments. Ends move with increasing functions: the interval of a perplexity is exp of that
// of the mean NLL.
std::optional<std::pair<double, double>> bootstrap_mean(
    std::span<const std::vector<double>> sequences, const bootstrap_options& options = {});

}  // namespace kvreplay::reports
