#include "replay/survival.hpp"

#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <mutex>

#include "replay/bind.hpp"
#include "replay/recorded_rows.hpp"

namespace kvreplay::replay {
namespace {

// d/d(ln beta) of the log likelihood; falls as beta grows.
double slope(double log_beta, const std::vector<std::int32_t>& age,
             const std::vector<double>& alive, const std::vector<std::int64_t>& seen) {
  double sum = 0;
  for (size_t i = 0; i < age.size(); ++i) {
    const double a = age[i], n = static_cast<double>(seen[i]);
    // beta^a / (1 - beta^a), stable at both ends.
    const double odds = 1 / std::expm1(-a * log_beta);
    sum += n * a * (alive[i] - (1 - alive[i]) * odds);
  }
  return sum;
}

// ln of a share, with 0 ln 0 = 0 on the caller's side.
double entropy_term(double p, double q) { return p > 0 ? p * std::log(std::max(q, 1e-300)) : 0; }

void finish(survival_curve& curve) {
  curve.beta = fit_geometric(curve.age, curve.alive, curve.seen);
  double seen = 0, alive = 0, fitted = 0;
  for (size_t i = 0; i < curve.age.size(); ++i) {
    const double q = std::pow(curve.beta, curve.age[i]), n = static_cast<double>(curve.seen[i]);
    curve.worst = std::max(curve.worst, std::fabs(curve.alive[i] - q));
    seen += n;
    alive += n * curve.alive[i];
    fitted += n * (entropy_term(curve.alive[i], q) + entropy_term(1 - curve.alive[i], 1 - q));
  }
  if (seen == 0) return;
  const double share = alive / seen;
  const double constant = entropy_term(share, share) + entropy_term(1 - share, 1 - share);
  curve.log_likelihood_gain = fitted / seen - constant;
}

}  // namespace

last_ages measure_last_ages(const traces::reader& trace, int sequence, int layer,
                            std::int64_t end) {
  const auto shape = cache_shape_for(trace.model(), {&layer, 1});
  const auto data = load_layer(trace, sequence, layer);
  const int group = shape.group(), window = shape.window_of(0);
  last_ages out(static_cast<size_t>(shape.kv_heads),
                std::vector<std::int32_t>(static_cast<size_t>(data.n_tokens), -1));
  const std::int64_t last_row = end > 0 ? std::min(end, data.n_tokens) : data.n_tokens;
  for_each_row(shape, data, data.first_row, last_row, [&](const attention_rows& at) {
    const std::int64_t visible = window > 0 ? std::min<std::int64_t>(window, at.t + 1) : at.t + 1;
    const float uniform = static_cast<float>(group) / static_cast<float>(visible);
    for (int g = 0; g < shape.kv_heads; ++g) {
      auto& last = out[static_cast<size_t>(g)];
      for (std::int64_t i = at.t + 1 - visible; i <= at.t; ++i) {
        float mass = 0;
        for (int h = g * group; h < (g + 1) * group; ++h) mass += at.rows[h * at.stride + i];
        if (mass > uniform) last[static_cast<size_t>(i)] = static_cast<std::int32_t>(at.t - i);
      }
    }
  });
  return out;
}

double fit_geometric(const std::vector<std::int32_t>& age, const std::vector<double>& alive,
                     const std::vector<std::int64_t>& seen) {
  double low = -50, high = -1e-12;  // of ln beta; the slope falls between them
  if (!(slope(low, age, alive, seen) > 0)) return std::exp(low);
  if (!(slope(high, age, alive, seen) < 0)) return std::exp(high);
  for (int i = 0; i < 200; ++i) {
    const double middle = 0.5 * (low + high);
    (slope(middle, age, alive, seen) > 0 ? low : high) = middle;
  }
  return std::exp(0.5 * (low + high));
}

std::vector<survival_curve> measure_survival(
    const traces::reader& trace,
    const std::function<void(std::int64_t done, std::int64_t total)>& progress) {
  const auto& layers = trace.model().layers;
  const auto heads = static_cast<size_t>(trace.model().n_kv_heads);
  std::vector<survival_curve> curves(layers.size() * heads);
  std::mutex mutex;
  std::int64_t done = 0;
  tbb::parallel_for(size_t{0}, layers.size(), [&](size_t slot) {
    std::vector<std::vector<std::int64_t>> alive(heads), seen(heads);
    for (const auto& info : trace.sequences()) {
      const auto last = measure_last_ages(trace, info.id, layers[slot]);
      for (size_t g = 0; g < heads; ++g) {
        size_t point = 0;
        for (std::int64_t a = 1; a < info.n_tokens; a *= 2, ++point) {
          if (alive[g].size() <= point) {
            alive[g].push_back(0);
            seen[g].push_back(0);
          }
          for (std::int64_t i = 0; i + a < info.n_tokens; ++i) {
            ++seen[g][point];
            alive[g][point] += last[g][static_cast<size_t>(i)] >= a ? 1 : 0;
          }
        }
      }
    }
    for (size_t g = 0; g < heads; ++g) {
      auto& curve = curves[slot * heads + g];
      curve.layer = layers[slot];
      curve.kv_head = static_cast<int>(g);
      for (size_t point = 0; point < seen[g].size(); ++point) {
        curve.age.push_back(static_cast<std::int32_t>(std::int64_t{1} << point));
        curve.seen.push_back(seen[g][point]);
        curve.alive.push_back(static_cast<double>(alive[g][point]) /
                              static_cast<double>(seen[g][point]));
      }
      finish(curve);
    }
    const std::scoped_lock lock(mutex);
    if (progress) progress(++done, std::ssize(layers));
  });
  return curves;
}

}  // namespace kvreplay::replay
