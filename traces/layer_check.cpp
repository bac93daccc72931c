#include "traces/layer_check.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>

#include "traces/float16.hpp"
#include "traces/layout.hpp"

namespace kvreplay::traces {

namespace {

constexpr std::int64_t slice_rows = 512;
constexpr std::int64_t kept_texts = 20;

// `count` of the numbers [first, last], spread evenly, both ends included.
std::vector<std::int64_t> spread(std::int64_t first, std::int64_t last, std::int64_t count) {
  std::vector<std::int64_t> chosen;
  const std::int64_t span = last - first;
  if (span < 0) return chosen;
  count = std::clamp<std::int64_t>(count, 1, span + 1);
  for (std::int64_t i = 0; i < count; ++i) {
    chosen.push_back(count == 1 ? last : first + i * span / (count - 1));
  }
  return chosen;
}

std::vector<double> to_double(const half_bits* from, std::int64_t n) {
  std::vector<double> values(static_cast<size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) {
    values[static_cast<size_t>(i)] = static_cast<double>(half_to_float(from[i]));
  }
  return values;
}

}  // namespace

void check_log::add(const data_fault& fault) {
  ++report_.finding_count;
  report_.nonfinite_values += fault.nonfinite;
  if (static_cast<std::int64_t>(report_.findings.size()) < kept_texts) {
    report_.findings.push_back({fault.text});
  }
}

layer_check::layer_check(const reader& file, int sequence, int layer, const check_options& options,
                         check_log& log)
    : file_(file),
      model_(file.model()),
      info_(file.sequence(sequence)),
      layer_(file.layer(sequence, layer)),
      sequence_(sequence),
      number_(layer),
      options_(options),
      log_(log),
      where_(fmt::format("{}: {}", file.path(), file.layer_path(sequence, layer))),
      recompute_(layer_.has_q && layer_.has_k && layer_.has_v),
      exact_(model_.cache_dtype == "float16"),
      cache_(model_, recompute_ ? info_.n_tokens : 0) {
  choose_rows();
  if (layer_.has_value_norm && layer_.has_v) wo_ = file.wo(layer);
  for (size_t i = 0; i < wo_.size(); i += static_cast<size_t>(model_.hidden_size)) {
    double norm = 0;
    for (std::int64_t j = 0; j < model_.hidden_size; ++j) {
      norm += std::fabs(static_cast<double>(wo_[i + static_cast<size_t>(j)]));
    }
    wo_norm_.push_back(norm);
  }
}

void layer_check::choose_rows() {
  const std::int64_t count = options_.all ? info_.n_tokens : options_.sample_rows;
  rows_ = spread(layer_.first_row, info_.n_tokens - 1, count);
  if (!layer_.has_attn) return;
  attn_pos_ = file_.attention_positions(sequence_, number_);
  attn_rows_ = spread(0, static_cast<std::int64_t>(attn_pos_.size()) - 1, count);
}

std::string layer_check::at(const char* dataset, std::int64_t step) const {
  return fmt::format("{}/{}: step {}", where_, dataset, step);
}

void layer_check::run() {
  bool clean = true;
  for (std::int64_t begin = 0; begin < info_.n_tokens; begin += slice_rows) {
    const std::int64_t end = std::min(begin + slice_rows, info_.n_tokens);
    const layer_slice slice = file_.read_layer(sequence_, number_, begin, end);
    // A bad key or value spoils every later row: from there on only the values are looked at.
    clean = check_values(slice) && clean;
    if (!clean) continue;
    if (recompute_) {
      cache_.append(slice);
      check_slice_rows(slice);
    }
    if (!wo_.empty()) check_value_norms(slice);
  }
  if (!clean) return;
  check_attention_rows();
  if (layer_.has_column_sum) check_column_sums();
}

bool layer_check::check_values(const layer_slice& slice) {
  const std::int64_t before = log_.report().finding_count;
  check_slice(slice, model_, where_, [this](const data_fault& fault) { log_.add(fault); });
  log_.report().values_checked += static_cast<std::int64_t>(
      slice.q.size() + slice.k.size() + slice.v.size() + slice.o.size() + slice.lse.size() +
      slice.value_norm.size() + slice.residual_norm.size() + slice.retention.size() +
      slice.image_score.size());
  return log_.report().finding_count == before;
}

void layer_check::check_slice_rows(const layer_slice& slice) {
  if (!layer_.has_o && !layer_.has_lse) return;
  const auto first = std::lower_bound(rows_.begin(), rows_.end(), slice.row_begin);
  const auto last = std::lower_bound(first, rows_.end(), slice.end);
  const std::vector<std::int64_t> rows(first, last);
  std::vector<row_outcome> outcomes(rows.size());
  tbb::parallel_for(size_t{0}, rows.size(),
                    [&](size_t i) { outcomes[i] = check_row(slice, rows[i]); });
  check_report& report = log_.report();
  for (const row_outcome& one : outcomes) {
    ++report.rows_checked;
    report.max_lse_error = std::max(report.max_lse_error, one.lse_error);
    report.max_o_error = std::max(report.max_o_error, one.o_error);
    for (const std::string& text : one.faults) log_.add({text, 0});
  }
}

layer_check::row_outcome layer_check::check_row(const layer_slice& slice, std::int64_t t) const {
  row_outcome outcome;
  attention_result expected;
  for (int head = 0; head < model_.n_q_heads; ++head) {
    const std::int64_t at_q =
        row_offset(t - slice.row_begin, model_.n_q_heads, head, model_.head_dim);
    const std::vector<double> q = to_double(&slice.q[static_cast<size_t>(at_q)], model_.head_dim);
    recompute_row(cache_, model_, number_, head, t, q.data(), !exact_, expected);
    compare_row(slice, t, head, expected, outcome);
  }
  return outcome;
}

// Tolerances: where attention met the 16-bit values exactly as stored, only rounding of o and lse;
// otherwise also what rounding q, k and v for storage can have moved.
void layer_check::compare_row(const layer_slice& slice, std::int64_t t, int head,
                              const attention_result& expected, row_outcome& outcome) const {
  const std::int64_t row = t - slice.row_begin;
  const double e = expected.score_error;
  if (!slice.lse.empty()) {
    const auto found =
        static_cast<double>(slice.lse[static_cast<size_t>(row * model_.n_q_heads + head)]);
    // Scores of several thousand occur (Qwen2's first layer): FP32 rounds them by more than 1e-3.
    const double error = std::fabs(found - expected.lse);
    const double tolerance = e + 1e-3 + 0x1p-20 * std::fabs(expected.lse);
    outcome.lse_error = std::max(outcome.lse_error, error);
    if (!(error <= tolerance)) {
      outcome.faults.push_back(
          fmt::format("{}, head {}: {:.6g}, expected {:.6g} from q and k "
                      "(tolerance {:.1e})",
                      at("lse", t), head, found, expected.lse, tolerance));
    }
  }
  if (slice.o.empty()) return;
  bool told = false;
  for (std::int64_t c = 0; c < model_.value_dim; ++c) {
    const auto found = static_cast<double>(
        slice.o[static_cast<size_t>(row_offset(row, model_.n_q_heads, head, model_.value_dim, c))]);
    const double want = expected.o[static_cast<size_t>(c)], error = std::fabs(found - want);
    const double tolerance =
        exact_ ? 2e-3 * (1 + std::fabs(want)) : (2 * e + 0x1p-10) * expected.largest_value + 1e-3;
    outcome.o_error = std::max(outcome.o_error, error / (1 + std::fabs(want)));
    if (error <= tolerance || told) continue;
    told = true;
    outcome.faults.push_back(
        fmt::format("{}, head {}, channel {}: {:.6g}, expected {:.6g} from q, k and v (tolerance "
                    "{:.1e})",
                    at("o", t), head, c, found, want, tolerance));
  }
}

void layer_check::check_attention_rows() {
  for (const std::int64_t index : attn_rows_) {
    const std::int64_t t = attn_pos_[static_cast<size_t>(index)];
    const std::vector<half_bits> row = file_.attention_row(sequence_, number_, index);
    const std::int64_t before = log_.report().finding_count;
    check_attention(row, info_.n_tokens, t, !model_.sinks.empty(), where_ + "/attn",
                    [this](const data_fault& fault) { log_.add(fault); });
    log_.report().values_checked += static_cast<std::int64_t>(row.size());
    if (log_.report().finding_count == before) check_attention_sums(t, row);
  }
}

// The row against q and k where both are there; otherwise its sum against a recorded lse.
void layer_check::check_attention_sums(std::int64_t t, const std::vector<half_bits>& row) {
  if (t < layer_.first_row || (!recompute_ && !layer_.has_lse)) return;
  const layer_slice slice = file_.read_layer(sequence_, number_, t, t + 1);
  row_outcome outcome;
  attention_result expected;
  for (int head = 0; head < model_.n_q_heads; ++head) {
    if (recompute_) {
      const std::vector<double> q = to_double(
          &slice.q[static_cast<size_t>(std::int64_t{head} * model_.head_dim)], model_.head_dim);
      recompute_row(cache_, model_, number_, head, t, q.data(), !exact_, expected);
    } else {
      const double sink =
          model_.sinks.empty()
              ? -HUGE_VAL
              : model_.sinks[static_cast<size_t>(number_ * model_.n_q_heads + head)];
      expected.p.clear();
      expected.sink_share =
          std::exp(sink - static_cast<double>(slice.lse[static_cast<size_t>(head)]));
    }
    compare_attention(t, head, &row[static_cast<size_t>(head * info_.n_tokens)], expected, outcome);
  }
  for (const std::string& text : outcome.faults) log_.add({text, 0});
}

void layer_check::compare_attention(std::int64_t t, int head, const half_bits* row,
                                    const attention_result& expected, row_outcome& outcome) const {
  double sum = 0, worst = 0;
  std::int64_t worst_at = -1;
  // Relative error of a probability: lse to 1e-3, both scores to e, and the rounding of the row.
  const double relative = std::expm1(2 * expected.score_error) + 2e-3 + 0x1p-11;
  for (std::int64_t i = 0; i <= t; ++i) {
    const auto found = static_cast<double>(half_to_float(row[i]));
    sum += found;
    if (expected.p.empty()) continue;
    const double want = expected.p[static_cast<size_t>(i)];
    const double excess = std::fabs(found - want) - (relative * want + 0x1p-24);
    if (excess > worst) {
      worst = excess;
      worst_at = i;
    }
  }
  if (worst_at >= 0) {
    outcome.faults.push_back(fmt::format(
        "{}, head {}, position {}: probability {:.6g}, expected {:.6g} from q and k", at("attn", t),
        head, worst_at, static_cast<double>(half_to_float(row[worst_at])),
        expected.p[static_cast<size_t>(worst_at)]));
  }
  const double want = 1 - expected.sink_share;
  const double tolerance = attention_tolerance(t + 1) + relative * expected.sink_share;
  if (!(std::fabs(sum - want) <= tolerance)) {
    outcome.faults.push_back(
        fmt::format("{}, head {}: probabilities sum to {:.6f}, expected {:.6f} = 1 - p(sink) "
                    "(tolerance {:.1e})",
                    at("attn", t), head, sum, want, tolerance));
  }
}

// Tolerance: v and wo may each have been rounded to 16 bits (2^-11 of every product), twice over.
void layer_check::check_value_norms(const layer_slice& slice) {
  const std::int64_t hq = model_.n_q_heads, dv = model_.value_dim, hidden = model_.hidden_size;
  const auto first = std::lower_bound(rows_.begin(), rows_.end(), slice.begin);
  const auto last = std::lower_bound(first, rows_.end(), slice.end);
  const std::vector<std::int64_t> rows(first, last);
  std::vector<std::string> faults(rows.size());
  tbb::parallel_for(size_t{0}, rows.size(), [&](size_t i) {
    std::vector<double> projected(static_cast<size_t>(hidden));
    const std::int64_t row = rows[i] - slice.begin;
    for (std::int64_t h = 0; h < hq && faults[i].empty(); ++h) {
      std::fill(projected.begin(), projected.end(), 0.0);
      const std::int64_t at_v = row_offset(row, model_.n_kv_heads, h / model_.group(), dv);
      double bound = 0, norm = 0;
      for (std::int64_t c = 0; c < dv; ++c) {
        const auto value =
            static_cast<double>(half_to_float(slice.v[static_cast<size_t>(at_v + c)]));
        bound += std::fabs(value) * wo_norm_[static_cast<size_t>(h * dv + c)];
        const float* weights = &wo_[static_cast<size_t>(row_offset(h, dv, c, hidden))];
        for (std::int64_t j = 0; j < hidden; ++j) {
          projected[static_cast<size_t>(j)] += value * static_cast<double>(weights[j]);
        }
      }
      for (const double x : projected) norm += std::fabs(x);
      const auto found = static_cast<double>(slice.value_norm[static_cast<size_t>(row * hq + h)]);
      const double tolerance = 0x1p-9 * bound + 1e-6;
      if (std::fabs(found - norm) <= tolerance) continue;
      faults[i] =
          fmt::format("{}, head {}: {:.6g}, expected {:.6g} from v and wo (tolerance {:.1e})",
                      at("value_norm", rows[i]), h, found, norm, tolerance);
    }
  });
  for (const std::string& text : faults) {
    if (!text.empty()) log_.add({text, 0});
  }
}

void layer_check::check_column_sums() {
  const std::vector<float> found = file_.column_sum(sequence_, number_);
  const auto prompt = static_cast<size_t>(info_.n_prompt);
  log_.report().values_checked += static_cast<std::int64_t>(found.size());
  for (size_t head = 0; head * prompt < found.size(); ++head) {
    double sum = 0;
    bool good = true;
    for (size_t i = 0; i < prompt; ++i) {
      const float value = found[head * prompt + i];
      good = good && std::isfinite(value) && value >= 0;
      sum += static_cast<double>(value);
    }
    // Every prompt row gives a mass of 1, or less where a learned sink takes some.
    const auto rows = static_cast<double>(prompt);
    const double tolerance = 1e-3 * rows + 1e-3;
    good = good && sum <= rows + tolerance && (!model_.sinks.empty() || sum >= rows - tolerance);
    if (good) continue;
    log_.add(
        {fmt::format("{}/column_sum: head {}: sums to {:.6g}, expected finite values >= 0 that "
                     "sum to {}{}",
                     where_, head, sum, model_.sinks.empty() ? "" : "at most ", prompt),
         0});
    return;
  }
  if (options_.all && recompute_ && layer_.first_row == 0) compare_column_sums(found);
}

void layer_check::compare_column_sums(const std::vector<float>& found) {
  const std::int64_t prompt = info_.n_prompt, hq = model_.n_q_heads, d = model_.head_dim;
  std::vector<double> sums(found.size()), slack(found.size());
  for (std::int64_t begin = 0; begin < prompt; begin += slice_rows) {
    const std::int64_t end = std::min(begin + slice_rows, prompt);
    const layer_slice slice = file_.read_layer(sequence_, number_, begin, end);
    tbb::parallel_for(0, model_.n_q_heads, [&](int head) {
      attention_result row;
      for (std::int64_t t = begin; t < end; ++t) {
        const std::vector<double> q =
            to_double(&slice.q[static_cast<size_t>(row_offset(t - begin, hq, head, d))], d);
        recompute_row(cache_, model_, number_, head, t, q.data(), !exact_, row);
        const double relative = std::expm1(2 * row.score_error) + 2e-3;
        for (std::int64_t i = 0; i <= t; ++i) {
          const double p = row.p[static_cast<size_t>(i)];
          sums[static_cast<size_t>(head * prompt + i)] += p;
          slack[static_cast<size_t>(head * prompt + i)] += p * relative;
        }
      }
    });
  }
  for (size_t i = 0; i < found.size(); ++i) {
    const double tolerance = slack[i] + 1e-3;
    if (std::fabs(static_cast<double>(found[i]) - sums[i]) <= tolerance) continue;
    log_.add({fmt::format("{}/column_sum: head {}, step {}: {:.6g}, expected {:.6g} from q and k "
                          "(tolerance {:.1e})",
                          where_, i / static_cast<size_t>(prompt), i % static_cast<size_t>(prompt),
                          found[i], sums[i], tolerance),
              0});
  }
}

}  // namespace kvreplay::traces
