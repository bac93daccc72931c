#include "replay/direct.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "replay/logit_scores.hpp"
#include "reports/bootstrap.hpp"

namespace kvreplay::replay {
namespace {

constexpr double unit = 0x1p-30;
constexpr float largest = 0x1p20F;        // so that a sum over thousands of layers fits 64 bits
constexpr std::int64_t chunk_steps = 32;  // whose shifted rows of all lanes are held at once

std::int64_t fixed(float x) {
  return std::llround(static_cast<double>(std::clamp(x, -largest, largest)) / unit);
}

double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

void store(std::span<const logit_score> scores, reports::result& row) {
  std::vector<double> kl, nll;
  for (const auto& s : scores) {
    if (!s.finite) return;
    kl.push_back(s.kl);
    nll.push_back(s.nll);
  }
  nll.pop_back();  // the last position has no next token
  auto& q = row.quality;
  q.direct_kl = mean(kl);
  if (const auto interval = reports::bootstrap_mean({&kl, 1}))
    row.quality_ci["direct_kl"] = *interval;
  if (!nll.empty()) q.direct_nll = mean(nll);
  if (q.residual_rel_l2) q.kl_proxy = std::sqrt(*q.direct_kl) * *q.residual_rel_l2;
}

}  // namespace

void direct_error::add(std::int64_t step, std::span<const float> policy,
                       std::span<const float> full) {
  const std::scoped_lock lock(mutex_);
  std::int64_t* at = &sum_[static_cast<size_t>(step * hidden_)];
  for (size_t i = 0; i < policy.size(); ++i) at[i] += fixed(policy[i] - full[i]);
}

void direct_error::shifted(std::int64_t step, const float* base, float* out) const {
  const std::int64_t* at = &sum_[static_cast<size_t>(step * hidden_)];
  for (std::int64_t i = 0; i < hidden_; ++i) {
    out[i] = static_cast<float>(static_cast<double>(base[i]) + static_cast<double>(at[i]) * unit);
  }
}

void score_direct(const traces::reader& trace, const traces::sequence_info& info,
                  const tracer::model& model, std::int64_t skip,
                  std::span<const direct_lane> lanes) {
  const std::int64_t hidden = model.config().hidden_size, steps = info.n_decode();
  const auto first_row = std::lower_bound(info.logit_pos.begin(), info.logit_pos.end(),
                                          static_cast<std::int32_t>(info.n_prompt)) -
                         info.logit_pos.begin();
  const auto tokens = trace.tokens(info.id);
  std::vector<std::vector<logit_score>> scores(lanes.size());
  for (auto& s : scores) s.resize(static_cast<size_t>(steps));
  for (std::int64_t begin = skip; begin < steps; begin += chunk_steps) {
    const std::int64_t n = std::min(chunk_steps, steps - begin);
    const auto base = trace.residual_final(info.id, first_row + begin, first_row + begin + n);
    std::vector<float> rows(lanes.size() * static_cast<size_t>(n * hidden));
    std::vector<scored_position> positions(static_cast<size_t>(n));
    for (std::int64_t i = 0; i < n; ++i) {
      auto& at = positions[static_cast<size_t>(i)];
      at.position = info.n_prompt + begin + i;
      if (begin + i + 1 < steps) at.next = tokens[static_cast<size_t>(at.position + 1)];
      at.reference = &base[static_cast<size_t>(i * hidden)];
      for (size_t lane = 0; lane < lanes.size(); ++lane) {
        float* row = &rows[(lane * static_cast<size_t>(n) + static_cast<size_t>(i)) *
                           static_cast<size_t>(hidden)];
        lanes[lane].error->shifted(begin + i, at.reference, row);
        at.rows.push_back({row, nullptr, &scores[lane][static_cast<size_t>(begin + i)]});
      }
    }
    score_logits(model, positions);
  }
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    store(std::span<const logit_score>(scores[lane]).subspan(static_cast<size_t>(skip)),
          *lanes[lane].row);
  }
}

}  // namespace kvreplay::replay
