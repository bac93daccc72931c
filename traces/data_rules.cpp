#include "traces/data_rules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "traces/float16.hpp"

namespace kvreplay::traces {

namespace {

std::int64_t count_nonfinite(std::span<const half_bits> row) {
  std::int64_t count = 0;
  for (const half_bits bits : row) count += half_is_finite(bits) ? 0 : 1;
  return count;
}

std::int64_t count_nonfinite(std::span<const float> row) {
  std::int64_t count = 0;
  for (const float value : row) count += std::isfinite(value) ? 0 : 1;
  return count;
}

template <class T>
void check_rows(std::span<const T> values, std::int64_t width, std::int64_t first,
                const std::string& where, const fault_sink& sink) {
  for (std::int64_t row = 0; row * width < static_cast<std::int64_t>(values.size()); ++row) {
    const auto one = values.subspan(static_cast<size_t>(row * width), static_cast<size_t>(width));
    const std::int64_t bad = count_nonfinite(one);
    if (bad == 0) continue;
    sink({fmt::format("{}: step {}: {} of {} values are NaN or infinite, expected finite values{}",
                      where, first + row, bad, width,
                      bad == width ? " (the row was never written?)" : ""),
          bad});
  }
}

bool all_zero(const std::vector<half_bits>& values, std::int64_t row, std::int64_t width) {
  const auto begin = values.begin() + row * width;
  return std::all_of(begin, begin + width, half_is_zero);
}

void check_zero_rows(const layer_slice& slice, const model_info& model, const std::string& where,
                     const fault_sink& sink) {
  if (slice.k.empty() || slice.v.empty()) return;
  const std::int64_t k_width = std::int64_t{model.n_kv_heads} * model.head_dim;
  const std::int64_t v_width = std::int64_t{model.n_kv_heads} * model.value_dim;
  const std::int64_t q_width = std::int64_t{model.n_q_heads} * model.head_dim;
  for (std::int64_t t = slice.begin; t < slice.end; ++t) {
    if (!all_zero(slice.k, t - slice.begin, k_width)) continue;
    if (!all_zero(slice.v, t - slice.begin, v_width)) continue;
    const bool has_q = !slice.q.empty() && t >= slice.row_begin;
    if (has_q && !all_zero(slice.q, t - slice.row_begin, q_width)) continue;
    sink({fmt::format("{}: step {}: q, k and v are all zero, expected recorded values (the row was "
                      "never written?)",
                      where, t),
          0});
  }
}

// `good` holds for every value of a finite row, else the row is a fault.
template <class Rule>
void check_range(const std::vector<float>& values, std::int64_t width, std::int64_t first,
                 const std::string& where, const char* expected, Rule good,
                 const fault_sink& sink) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i]) || good(values[i])) continue;
    sink({fmt::format("{}: step {}: {}, expected {}", where,
                      first + static_cast<std::int64_t>(i) / width, values[i], expected),
          0});
  }
}

}  // namespace

void check_slice(const layer_slice& slice, const model_info& model, const std::string& where,
                 const fault_sink& sink) {
  const std::int64_t hq = model.n_q_heads, hkv = model.n_kv_heads;
  const auto rows = [&](const auto& values, std::int64_t width, std::int64_t first,
                        const char* name) {
    check_rows(std::span(std::as_const(values)), width, first, where + "/" + name, sink);
  };
  rows(slice.q, hq * model.head_dim, slice.row_begin, "q");
  rows(slice.k, hkv * model.head_dim, slice.begin, "k");
  rows(slice.v, hkv * model.value_dim, slice.begin, "v");
  rows(slice.o, hq * model.value_dim, slice.row_begin, "o");
  rows(slice.lse, hq, slice.row_begin, "lse");
  rows(slice.value_norm, hq, slice.begin, "value_norm");
  rows(slice.residual_norm, 1, slice.begin, "residual_norm");
  rows(slice.retention, hkv, slice.begin, "retention");
  rows(slice.image_score, 1, slice.begin, "image_score");
  check_zero_rows(slice, model, where, sink);
  const auto not_negative = [](float x) { return x >= 0; };
  check_range(slice.value_norm, hq, slice.begin, where + "/value_norm", "a norm >= 0", not_negative,
              sink);
  check_range(slice.residual_norm, 1, slice.begin, where + "/residual_norm", "a norm >= 0",
              not_negative, sink);
  check_range(
      slice.retention, hkv, slice.begin, where + "/retention", "the logarithm of a retention, <= 0",
      [](float x) { return x <= 0; }, sink);
}

void check_confidence(std::span<const float> rows, std::span<const std::int32_t> positions,
                      const std::string& where, const fault_sink& sink) {
  for (size_t row = 0; row < positions.size(); ++row) {
    const float entropy = rows[4 * row], margin = rows[4 * row + 1], top = rows[4 * row + 2],
                lse = rows[4 * row + 3];
    std::int64_t bad = 0;
    for (const float value : {entropy, top, lse}) bad += std::isfinite(value) ? 0 : 1;
    const bool margin_ok = std::isfinite(margin) || (std::isinf(margin) && margin > 0);
    bad += margin_ok ? 0 : 1;
    const bool in_range = entropy >= -1e-3f && margin >= 0 && top > 0 && top <= 1 + 1e-5f;
    if (bad == 0 && in_range) continue;
    sink({fmt::format("{}: step {}: entropy {}, margin {}, top {}, lse {}, expected entropy >= 0, "
                      "margin >= 0 (it alone may be +inf), top in (0, 1], finite lse",
                      where, positions[row], entropy, margin, top, lse),
          bad});
  }
}

void check_logits(std::span<const float> rows, std::span<const std::int32_t> positions,
                  const model_info& model, const std::string& where, const fault_sink& sink) {
  const auto width = static_cast<size_t>(model.logit_size);
  for (size_t row = 0; row < positions.size(); ++row) {
    std::int64_t bad = 0, possible = 0;
    for (size_t i = 0; i < width; ++i) {
      const float x = rows[row * width + i];
      if (std::isnan(x) || (std::isinf(x) && x > 0)) ++bad;
      if (i < static_cast<size_t>(model.vocab_size) && std::isfinite(x)) ++possible;
    }
    if (bad > 0) {
      sink({fmt::format("{}: step {}: {} of {} logits are NaN or +inf, expected finite or -inf",
                        where, positions[row], bad, width),
            bad});
    } else if (possible == 0) {
      sink({fmt::format("{}: step {}: all logits are -inf, expected at least one finite", where,
                        positions[row]),
            0});
    }
  }
}

void check_finite(std::span<const float> rows, std::int64_t width,
                  std::span<const std::int32_t> positions, const std::string& where,
                  const fault_sink& sink) {
  for (size_t row = 0; row < positions.size(); ++row) {
    const auto one = rows.subspan(row * static_cast<size_t>(width), static_cast<size_t>(width));
    if (const std::int64_t bad = count_nonfinite(one); bad > 0) {
      sink({fmt::format("{}: step {}: {} of {} values are NaN or infinite, expected finite values",
                        where, positions[row], bad, width),
            bad});
    }
  }
}

double attention_tolerance(std::int64_t visible) {
  return static_cast<double>(visible) * 0x1p-25 + 0x1p-11;
}

void check_attention(std::span<const half_bits> row, std::int64_t n_tokens, std::int64_t position,
                     bool sinks, const std::string& where, const fault_sink& sink) {
  const std::int64_t heads = static_cast<std::int64_t>(row.size()) / n_tokens;
  const double tolerance = attention_tolerance(position + 1);
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto one = row.subspan(static_cast<size_t>(h * n_tokens), static_cast<size_t>(n_tokens));
    const auto at = [&] { return fmt::format("{}: step {}, head {}", where, position, h); };
    if (const std::int64_t bad = count_nonfinite(one); bad > 0) {
      sink({fmt::format("{}: {} probabilities are NaN or infinite", at(), bad), bad});
      continue;
    }
    double sum = 0;
    float low = 0, future = 0;
    for (std::int64_t i = 0; i < n_tokens; ++i) {
      const float p = half_to_float(one[static_cast<size_t>(i)]);
      sum += static_cast<double>(p);
      low = std::min(low, p);
      if (i > position) future = std::max(future, std::fabs(p));
    }
    if (low < 0) sink({fmt::format("{}: probability {}, expected >= 0", at(), low), 0});
    if (future > 0) {
      sink(
          {fmt::format("{}: probability {} past the row's position, expected 0", at(), future), 0});
    }
    if (sinks ? sum <= 0 || sum > 1 + tolerance : std::fabs(sum - 1) > tolerance) {
      sink(
          {fmt::format("{}: probabilities sum to {:.6f}, expected {} (tolerance {:.1e})", at(), sum,
                       sinks ? "more than 0 and at most 1" : "1, as the file declares no sinks",
                       tolerance),
           0});
    }
  }
}

}  // namespace kvreplay::traces
