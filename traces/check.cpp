#include "traces/check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "traces/data_rules.hpp"
#include "traces/layer_check.hpp"

namespace kvreplay::traces {

namespace {

constexpr std::int64_t logit_block = 64;

struct confidence_row {
  double entropy = 0, margin = 0, top = 0, lse = 0, largest = 0;
};

// FORMAT.md's columns of `confidence`, over the real ids, in double.
confidence_row confidence_of(std::span<const float> logits) {
  const double none = -std::numeric_limits<double>::infinity();
  double first = none, second = none;
  confidence_row row;
  for (const float logit : logits) {
    const auto x = static_cast<double>(logit);
    if (std::isfinite(x)) row.largest = std::max(row.largest, std::fabs(x));
    second = std::max(second, std::min(x, first));
    first = std::max(first, x);
  }
  double sum = 0, weighted = 0;
  for (const float logit : logits) {
    const double below = static_cast<double>(logit) - first;
    const double weight = std::exp(below);
    sum += weight;
    if (weight > 0) weighted += weight * below;
  }
  row.lse = first + std::log(sum);
  row.entropy = std::log(sum) - weighted / sum;
  row.margin = first - second;
  row.top = 1 / sum;
  return row;
}

class sequence_check {
 public:
  sequence_check(const reader& file, int id, check_log& log)
      : file_(file),
        info_(file.sequence(id)),
        log_(log),
        where_(fmt::format("{}: sequences/{}", file.path(), id)) {}

  void check_rows() {
    check_tokens();
    const auto sink = [this](const data_fault& fault) { log_.add(fault); };
    const std::vector<float> confidence = file_.confidence(info_.id);
    check_report& report = log_.report();
    report.values_checked += static_cast<std::int64_t>(confidence.size());
    const std::int64_t before = report.finding_count;
    if (!confidence.empty()) {
      check_confidence(confidence, info_.logit_pos, where_ + "/confidence", sink);
    }
    const bool compare = !confidence.empty() && report.finding_count == before;
    const auto rows = static_cast<std::int64_t>(info_.logit_pos.size());
    for (std::int64_t begin = 0; begin < rows; begin += logit_block) {
      const std::int64_t end = std::min(begin + logit_block, rows);
      const auto positions =
          std::span(info_.logit_pos)
              .subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
      const std::vector<float> residual = file_.residual_final(info_.id, begin, end);
      if (!residual.empty()) {
        check_finite(residual, file_.model().hidden_size, positions, where_ + "/residual_final",
                     sink);
      }
      const std::vector<float> logits = file_.logits(info_.id, begin, end);
      report.values_checked += static_cast<std::int64_t>(logits.size() + residual.size());
      if (logits.empty()) continue;
      const std::int64_t known = report.finding_count;
      check_logits(logits, positions, file_.model(), where_ + "/logits", sink);
      if (compare && report.finding_count == known) compare_confidence(logits, confidence, begin);
    }
  }

 private:
  void check_tokens() {
    try {
      log_.report().values_checked += static_cast<std::int64_t>(file_.tokens(info_.id).size());
    } catch (const trace_error& error) {
      log_.add({error.what(), 0});
    }
  }

  // 16-bit logits may have been rounded after the confidence was taken: by 2^-10 of the largest.
  void compare_confidence(const std::vector<float>& logits, const std::vector<float>& confidence,
                          std::int64_t begin) {
    const auto width = static_cast<size_t>(file_.model().logit_size);
    const auto real = static_cast<size_t>(file_.model().vocab_size);
    for (size_t row = 0; row * width < logits.size(); ++row) {
      const confidence_row want = confidence_of(std::span(logits).subspan(row * width, real));
      const auto at = static_cast<size_t>(begin) + row;
      const double e = info_.logits_float16 ? 0x1p-10 * want.largest : 0;
      const double values[4] = {want.entropy, want.margin, want.top, want.lse};
      const double tolerances[4] = {2 * e * (1 + want.entropy) + 1e-3, 2 * e + 1e-3,
                                    2 * e * want.top + 1e-3, e + 1e-3};
      const char* names[4] = {"entropy", "margin", "top", "lse"};
      for (size_t c = 0; c < 4; ++c) {
        const auto found = static_cast<double>(confidence[4 * at + c]);
        if (found == values[c] || std::fabs(found - values[c]) <= tolerances[c]) continue;
        log_.add(
            {fmt::format("{}/confidence: step {}: {} {:.6g}, expected {:.6g} from the logits "
                         "(tolerance {:.1e})",
                         where_, info_.logit_pos[at], names[c], found, values[c], tolerances[c]),
             0});
        break;
      }
    }
  }

  const reader& file_;
  const sequence_info& info_;
  check_log& log_;
  std::string where_;
};

void check_weights(const reader& file, check_log& log) {
  for (const int layer : file.model().wo_layers) {
    const std::vector<float> weights = file.wo(layer);
    const auto bad =
        std::count_if(weights.begin(), weights.end(), [](float x) { return !std::isfinite(x); });
    log.report().values_checked += static_cast<std::int64_t>(weights.size());
    if (bad == 0) continue;
    log.add({fmt::format("{}: model/wo/{}: {} values are NaN or infinite, expected finite weights",
                         file.path(), layer, bad),
             bad});
  }
}

}  // namespace

check_report check(const reader& file, const check_options& options) {
  // Values are counted here, so the reads must not stop at the first bad one.
  const reader raw(file.path(), {.recover = !file.complete(), .check_data = false});
  check_report report;
  check_log log(report);
  check_weights(raw, log);
  const double layers = static_cast<double>(raw.sequences().size() * raw.model().layers.size());
  double done = 0;
  for (const sequence_info& info : raw.sequences()) {
    sequence_check(raw, info.id, log).check_rows();
    for (const int layer : raw.model().layers) {
      layer_check(raw, info.id, layer, options, log).run();
      if (options.progress) options.progress(++done / layers);
    }
  }
  return report;
}

}  // namespace kvreplay::traces
