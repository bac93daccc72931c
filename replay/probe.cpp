#include "replay/probe.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "replay/bind.hpp"
#include "replay/full_lane.hpp"
#include "replay/logit_scores.hpp"
#include "replay/model_match.hpp"
#include "replay/rounding.hpp"
#include "reports/correlation.hpp"

namespace kvreplay::replay {
namespace {

constexpr size_t draw_block = 64;  // neighbouring steps depend on each other: drawn together
constexpr int resamples = 1000;
constexpr std::uint64_t bootstrap_seed = 20240607;

std::vector<int> all_layers(int n) {
  std::vector<int> out(static_cast<size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

class probe_run {
 public:
  probe_run(const traces::reader& trace, int sequence, const tracer::model& model,
            std::span<const int> hidden)
      : info_(trace.sequence(sequence)),
        model_(model),
        hidden_(hidden),
        tokens_(trace.tokens(sequence)),
        shape_(cache_shape_for(trace.model(), all_layers(model.config().n_layers))),
        full_(shape_, info_.n_tokens) {
    for (const int n : hidden) series_.push_back({n, {}, {}, {}, {}, {}});
  }

  std::vector<probe_series> run(std::int64_t block,
                                const std::function<void(std::int64_t, std::int64_t)>& progress) {
    run_prompt();
    for (std::int64_t t = info_.n_prompt; t < info_.n_tokens; t += block) {
      run_block(t, std::min(block, info_.n_tokens - t));
      if (progress) progress(std::min(t + block, info_.n_tokens), info_.n_tokens);
    }
    for (auto& s : series_) correlate(s);
    return std::move(series_);
  }

 private:
  std::int64_t q_width() const { return std::int64_t{shape_.q_heads} * shape_.head_dim; }
  std::int64_t kv_width() const { return std::int64_t{shape_.kv_heads} * shape_.head_dim; }

  void run_prompt() {
    const auto n = static_cast<size_t>(info_.n_prompt);
    std::vector<std::int64_t> positions(n);
    std::iota(positions.begin(), positions.end(), 0);
    model_.forward(std::span(tokens_).first(n), positions, [&](tracer::attention_block& b) {
      round_to_half(b);
      std::vector<float> lse;
      full_.attend(b.layer, 0, b.rows, b.q.data(), b.k.data(), b.v.data(), b.o.data(), lse);
    });
  }

  // The full cache's rows first, then the same positions once per n.
  void run_block(std::int64_t first, std::int64_t steps) {
    std::vector<std::int32_t> tokens;
    std::vector<std::int64_t> positions;
    for (size_t copy = 0; copy <= hidden_.size(); ++copy) {
      for (std::int64_t t = first; t < first + steps; ++t) {
        tokens.push_back(tokens_[static_cast<size_t>(t)]);
        positions.push_back(t);
      }
    }
    const auto residual = model_.forward(
        tokens, positions, [&](tracer::attention_block& b) { attend(b, first, steps); });
    score(first, steps, residual);
  }

  void attend(tracer::attention_block& b, std::int64_t first, std::int64_t steps) {
    round_to_half(b);
    std::vector<float> lse;
    full_.attend(b.layer, first, steps, b.q.data(), b.k.data(), b.v.data(), b.o.data(), lse);
    for (size_t i = 0; i < hidden_.size(); ++i) {
      const std::int64_t row = static_cast<std::int64_t>(i + 1) * steps;
      attend_hidden(b, first, steps, row, hidden_[i]);
    }
  }

  // Rows that see 0 .. t-n-1 of the full cache and themselves. The first part is what a row at
  // position t-n-1 would see; the two are merged by their sums of exponentials.
  void attend_hidden(tracer::attention_block& b, std::int64_t first, std::int64_t steps,
                     std::int64_t row, int n) {
    auto shape = full_.shape_of(b.layer);
    const std::int64_t gap = std::int64_t{n} + 1;
    const bool none = shape.window > 0 && shape.window <= gap;
    if (shape.window > 0)
      shape.window -= static_cast<int>(std::min<std::int64_t>(gap, shape.window));
    const std::int64_t alone = none ? steps : std::clamp<std::int64_t>(gap - first, 0, steps);
    std::vector<float> lse(static_cast<size_t>(steps * shape_.q_heads), -INFINITY);
    float* o = b.o.data() + row * q_width();
    std::fill_n(o, steps * q_width(), 0.0F);
    if (alone < steps) {
      tracer::full_attention(shape, first + alone - gap, steps - alone,
                             b.q.data() + (row + alone) * q_width(), full_.k(b.layer),
                             full_.v(b.layer), o + alone * q_width(),
                             lse.data() + alone * shape_.q_heads);
    }
    for (std::int64_t r = 0; r < steps; ++r)
      merge_own(b, row + r, &lse[static_cast<size_t>(r * shape_.q_heads)]);
  }

  void merge_own(tracer::attention_block& b, std::int64_t row, const float* lse) const {
    const std::int64_t dim = shape_.head_dim;
    for (int h = 0; h < shape_.q_heads; ++h) {
      const float* q = b.q.data() + row * q_width() + h * dim;
      const float* k = b.k.data() + row * kv_width() + h / shape_.group() * dim;
      const float* v = b.v.data() + row * kv_width() + h / shape_.group() * dim;
      float* o = b.o.data() + row * q_width() + h * dim;
      double score = 0;
      for (std::int64_t c = 0; c < dim; ++c) score += static_cast<double>(q[c]) * k[c];
      score *= shape_.softmax_scale;
      const double own = 1 / (1 + std::exp(static_cast<double>(lse[h]) - score));
      for (std::int64_t c = 0; c < dim; ++c) {
        o[c] = static_cast<float>((1 - own) * o[c] + own * v[c]);
      }
    }
  }

  void score(std::int64_t first, std::int64_t steps, std::span<const float> residual) {
    const std::int64_t hidden = model_.config().hidden_size;
    const size_t copies = hidden_.size();
    std::vector<logit_score> full(static_cast<size_t>(steps)), own(full.size() * copies);
    std::vector<scored_position> positions(full.size());
    for (size_t i = 0; i < full.size(); ++i) {
      auto& at = positions[i];
      at.position = first + static_cast<std::int64_t>(i);
      at.reference = residual.data() + static_cast<std::int64_t>(i) * hidden;
      at.reference_out = &full[i];
      for (size_t c = 0; c < copies; ++c) {
        const auto row = static_cast<std::int64_t>((c + 1) * full.size() + i);
        at.rows.push_back({residual.data() + row * hidden, nullptr, &own[i * copies + c]});
      }
    }
    score_logits(model_, positions);
    for (size_t i = 0; i < full.size(); ++i) {
      const std::int64_t t = positions[i].position;
      for (size_t c = 0; c < copies; ++c) {
        if (t <= hidden_[c] || !own[i * copies + c].finite) continue;
        series_[c].points.push_back({t, full[i].confidence, own[i * copies + c].kl});
      }
    }
  }

  const traces::sequence_info& info_;
  const tracer::model& model_;
  std::span<const int> hidden_;
  std::vector<std::int32_t> tokens_;
  kernels::cache_shape shape_;
  full_lane full_;
  std::vector<probe_series> series_;
};

using columns = std::pair<std::vector<double>, std::vector<double>>;

reports::maybe finite_or_none(double x) {
  return std::isfinite(x) ? reports::maybe(x) : std::nullopt;
}

// Ends of the middle 95 % of the statistic over redrawn blocks of steps.
std::pair<reports::maybe, reports::maybe> interval(const columns& all,
                                                   double (*f)(std::span<const double>,
                                                               std::span<const double>)) {
  const size_t n = all.first.size(), blocks = (n + draw_block - 1) / draw_block;
  if (blocks < 2) return {};
  std::mt19937_64 generator(bootstrap_seed);
  std::vector<double> values;
  for (int r = 0; r < resamples; ++r) {
    columns drawn;
    for (size_t b = 0; b < blocks; ++b) {
      const size_t begin = generator() % blocks * draw_block;
      for (size_t i = begin; i < std::min(n, begin + draw_block); ++i) {
        drawn.first.push_back(all.first[i]);
        drawn.second.push_back(all.second[i]);
      }
    }
    if (const auto v = finite_or_none(f(drawn.first, drawn.second))) values.push_back(*v);
  }
  if (values.size() < resamples / 2) return {};
  std::sort(values.begin(), values.end());
  const auto rank = [&](double share) {
    return values[static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5)];
  };
  return {rank(0.025), rank(0.975)};
}

}  // namespace

void correlate(probe_series& series) {
  columns all;
  for (const auto& p : series.points) {
    all.first.push_back(p.confidence);
    all.second.push_back(p.kl);
  }
  if (all.first.size() < 2) return;
  series.pearson = finite_or_none(reports::pearson(all.first, all.second));
  series.spearman = finite_or_none(reports::spearman(all.first, all.second));
  series.pearson_ci = interval(all, reports::pearson);
  series.spearman_ci = interval(all, reports::spearman);
}

std::vector<probe_series> probe_confidence(
    const traces::reader& trace, int sequence, const tracer::model& model,
    std::span<const int> hidden, std::int64_t block,
    const std::function<void(std::int64_t, std::int64_t)>& progress) {
  require_same_model(trace, sequence, model);
  return probe_run(trace, sequence, model, hidden).run(block, progress);
}

}  // namespace kvreplay::replay
