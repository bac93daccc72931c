#include "replay/logit_scores.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "kernels/confidence.hpp"
#include "kernels/numerics.hpp"
#include "tracer/sampling.hpp"

namespace kvreplay::replay {
namespace {

constexpr size_t tile_rows = 256;  // rows of logits held at once

// Rows [begin, end) of one position, whose reference stands in tile row `first`, they after it.
struct tile_part {
  const scored_position* position = nullptr;
  size_t begin = 0, end = 0, first = 0;
};

double confidence_of(std::span<const float> logits, const kernels::logit_summary& plain,
                     const policies::gate_rule& gate) {
  const kernels::confidence_weights weights{gate.w_entropy, gate.w_margin, gate.w_top};
  const auto vocab = static_cast<int>(logits.size());
  kernels::logit_summary s = plain;
  if (gate.temperature != 1) {
    std::vector<float> scaled(logits.begin(), logits.end());
    for (float& x : scaled) x = static_cast<float>(x / gate.temperature);
    s = kernels::summarise_logits(scaled);
  }
  return kernels::confidence(s.entropy, s.margin, s.top, vocab, weights);
}

double log_sum(std::span<const float> logits, const kernels::logit_summary& s) {
  return static_cast<double>(logits[static_cast<size_t>(s.argmax)]) + s.log_z;
}

// sum of p (a - b) in eight independent sums; p = 0 hides what its logits are.
double weighted_difference(std::span<const float> p, std::span<const float> a,
                           std::span<const float> b) {
  constexpr size_t lanes = 8;
  double sums[lanes] = {};
  const size_t whole = p.size() / lanes * lanes;
  const auto term = [&](size_t i) {
    return p[i] > 0 ? static_cast<double>(p[i]) * (static_cast<double>(a[i]) - b[i]) : 0.0;
  };
  for (size_t i = 0; i < whole; i += lanes) {
    for (size_t j = 0; j < lanes; ++j) sums[j] += term(i + j);
  }
  double total = 0;
  for (size_t i = whole; i < p.size(); ++i) total += term(i);
  for (const double s : sums) total += s;
  return total;
}

// One part of a tile of logits; `logits` [rows, stride], of which `vocab` values are real.
class part_scorer {
 public:
  part_scorer(const tile_part& part, const float* logits, size_t stride, size_t vocab)
      : part_(part), logits_(logits), stride_(stride), vocab_(vocab) {}

  void run() const {
    const scored_position& at = *part_.position;
    const auto full = row(0);
    const auto reference = summarise(full);
    const double full_lse = log_sum(full, reference);
    if (at.reference_out != nullptr && part_.begin == 0) {
      *at.reference_out = score(full, reference, nullptr);
      at.reference_out->top1 = true;
    }
    if (at.recorded != nullptr && part_.begin == 0) {
      const std::span recorded(at.recorded, vocab_);
      const auto summary = summarise(recorded);
      *at.recorded_kl =
          std::max(0.0, weighted_difference(probabilities(recorded, summary), recorded, full) +
                            full_lse - log_sum(recorded, summary));
    }
    if (part_.begin == part_.end) return;
    const auto p = probabilities(full, reference);
    for (size_t i = part_.begin; i < part_.end; ++i) {
      const scored_row& request = at.rows[i];
      const auto own = row(1 + i - part_.begin);
      try {
        const auto summary = kernels::summarise_logits(own);
        logit_score out = score(own, summary, request.gate);
        out.kl =
            std::max(0.0, weighted_difference(p, full, own) + log_sum(own, summary) - full_lse);
        out.top1 = summary.argmax == reference.argmax;
        *request.out = out;
      } catch (const std::domain_error&) {
        *request.out = {};
        request.out->finite = false;
      }
    }
  }

 private:
  static std::vector<float> probabilities(std::span<const float> logits,
                                          const kernels::logit_summary& s) {
    std::vector<float> p(logits.begin(), logits.end());
    kernels::exp_in_place(p.data(), std::ssize(p), logits[static_cast<size_t>(s.argmax)]);
    const auto scale = static_cast<float>(std::exp(-s.log_z));
    for (float& x : p) x *= scale;
    return p;
  }

  std::span<const float> row(size_t i) const {
    return {logits_ + (part_.first + i) * stride_, vocab_};
  }

  kernels::logit_summary summarise(std::span<const float> logits) const {
    try {
      return kernels::summarise_logits(logits);
    } catch (const std::domain_error& e) {
      throw std::domain_error(fmt::format("step {}: {}", part_.position->position, e.what()));
    }
  }

  logit_score score(std::span<const float> logits, const kernels::logit_summary& s,
                    const policies::gate_rule* gate) const {
    logit_score out;
    const std::int32_t next = part_.position->next;
    if (next >= 0) out.nll = log_sum(logits, s) - logits[static_cast<size_t>(next)];
    out.confidence = confidence_of(logits, s, gate == nullptr ? policies::gate_rule{} : *gate);
    out.argmax = s.argmax;
    out.hit = s.argmax == next;
    if (const auto* choice = part_.position->choice; choice != nullptr) {
      out.chosen = tracer::choose_token(logits, choice->temperature, choice->uniform);
    }
    return out;
  }

  tile_part part_;
  const float* logits_;
  size_t stride_, vocab_;
};

class tile_scorer {
 public:
  explicit tile_scorer(const tracer::model& model)
      : model_(model), hidden_(static_cast<size_t>(model.config().hidden_size)) {}

  void add(const scored_position& at) {
    size_t begin = 0;
    do {
      if (rows_ + 2 > tile_rows) flush();
      const size_t end = std::min(at.rows.size(), begin + (tile_rows - rows_ - 1));
      parts_.push_back({&at, begin, end, rows_});
      take(at.reference);
      for (size_t i = begin; i < end; ++i) take(at.rows[i].residual);
      begin = end;
    } while (begin < at.rows.size());
  }

  void flush() {
    if (parts_.empty()) return;
    model_.logits(residual_, static_cast<std::int64_t>(rows_), logits_);
    const auto& config = model_.config();
    tbb::parallel_for(size_t{0}, parts_.size(), [&](size_t i) {
      part_scorer(parts_[i], logits_.data(), static_cast<size_t>(config.logit_size),
                  static_cast<size_t>(config.vocab_size))
          .run();
    });
    parts_.clear();
    residual_.clear();
    rows_ = 0;
  }

 private:
  void take(const float* row) {
    residual_.insert(residual_.end(), row, row + hidden_);
    ++rows_;
  }

  const tracer::model& model_;
  size_t hidden_, rows_ = 0;
  std::vector<tile_part> parts_;
  std::vector<float> residual_, logits_;  // [rows, hidden_size], [rows, logit_size]
};

}  // namespace

void score_logits(const tracer::model& model, std::span<const scored_position> positions) {
  tile_scorer scorer(model);
  for (const auto& at : positions) scorer.add(at);
  scorer.flush();
}

}  // namespace kvreplay::replay
