#include "replay/fit_retention.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <utility>

#include "replay/bind.hpp"
#include "replay/layer_data.hpp"
#include "replay/recorded_rows.hpp"
#include "replay/survival.hpp"
#include "reports/correlation.hpp"

namespace kvreplay::replay {
namespace {

constexpr size_t batch = 64;  // entries of every head per step
constexpr std::int64_t fewest_entries = 32;
constexpr double weight_decay = 0.3;
constexpr double watched_share = 0.2;  // of the training part
constexpr int moments = 8;             // at which held-out scores are compared with the future

// One entry as a gate learns from it: alive at 1, 2, 4 ... up to `ages` of them.
struct example {
  const float *k, *v;
  int ages, alive;  // alive at the first `alive` ages (it dies once)
};

double log_sigmoid(double z) {
  return z < 0 ? z - std::log1p(std::exp(z)) : -std::log1p(std::exp(-z));
}

// Negative log likelihood of an example under ln beta, summed over its ages; its slope too.
double loss_of(const example& e, double log_beta, double& slope) {
  double loss = 0;
  slope = 0;
  for (int i = 0; i < e.ages; ++i) {
    const double a = std::ldexp(1.0, i);
    if (i < e.alive) {
      loss -= a * log_beta;
      slope -= a;
    } else {
      loss -= std::log(std::max(-std::expm1(a * log_beta), 1e-300));
      slope += a / std::max(std::expm1(-a * log_beta), 1e-300);
    }
  }
  return loss;
}

// Adam (arXiv 1412.6980) with decoupled weight decay (arXiv 1711.05101) on one block of parameters.
class adam {
 public:
  explicit adam(size_t n) : m_(n), v_(n) {}
  // The first `weights` of x decay, the biases behind them do not.
  void step(double rate, size_t weights, std::span<const double> gradient, std::span<double> x) {
    ++t_;
    const double c1 = 1 - std::pow(0.9, t_), c2 = 1 - std::pow(0.999, t_);
    for (size_t i = 0; i < x.size(); ++i) {
      m_[i] = 0.9 * m_[i] + 0.1 * gradient[i];
      v_[i] = 0.999 * v_[i] + 0.001 * gradient[i] * gradient[i];
      x[i] -= rate * ((m_[i] / c1) / (std::sqrt(v_[i] / c2) + 1e-8) +
                      (i < weights ? weight_decay * x[i] : 0.0));
    }
  }

 private:
  std::vector<double> m_, v_;
  int t_ = 0;
};

// What one KV head of one layer learns: hidden weights [hidden, inputs], then biases [hidden].
struct head_gate {
  std::vector<double> mean, scale;  // [inputs]
  std::vector<double> own, own_gradient, best;
  std::vector<double> out_gradient;           // [hidden + 1]: of the output projection it uses
  std::vector<example> train, watched, held;  // watched: decides when to stop
  double log_beta = 0;                        // of the constant fitted to `train`
  std::unique_ptr<adam> optimiser;
  std::vector<size_t> order;
};

class retention_fit {
 public:
  retention_fit(const traces::reader& trace, const fit_options& options)
      : trace_(trace),
        model_(trace.model()),
        options_(options),
        inputs_(static_cast<size_t>(model_.head_dim + model_.value_dim)),
        hidden_(static_cast<size_t>(options.hidden)),
        heads_(model_.layers.size() * static_cast<size_t>(model_.n_kv_heads)) {}

  fit_outcome run();

 private:
  void split();
  void load();
  void load_layer_examples(size_t slot);
  void prepare_head(size_t head);
  void start_at_constants();
  void train();
  double forward(const head_gate& gate, std::span<const double> output, const example& e,
                 std::vector<double>& x, std::vector<double>& h) const;
  void gradient(size_t head, size_t first, size_t count);
  double mean_loss(std::vector<example> head_gate::*part, bool constant) const;
  void keep_best(double& least);
  void write_gate(fit_outcome& out) const;
  void write_rows(fit_outcome& out) const;
  void correlate(fit_outcome& out) const;
  void correlate_head(const fit_outcome& out, int sequence, size_t slot,
                      std::vector<double>& learned, std::vector<double>& recent) const;
  size_t output_of(size_t head) const {
    if (options_.projection == gate_projection::shared) return 0;
    return options_.projection == gate_projection::layer
               ? head / static_cast<size_t>(model_.n_kv_heads)
               : head;
  }
  size_t output_count() const { return output_of(gates_.size() - 1) + 1; }
  bool is_held(int sequence) const {
    return std::find(held_out_.begin(), held_out_.end(), sequence) != held_out_.end();
  }

  const traces::reader& trace_;
  const traces::model_info& model_;
  const fit_options& options_;
  size_t inputs_, hidden_, heads_;
  std::vector<int> held_out_;
  std::int64_t first_held_ = 0;
  std::vector<std::vector<layer_data>> data_;  // [sequences][recorded layers]
  std::vector<head_gate> gates_;               // [recorded layers * kv_heads]
  std::vector<double> output_, best_output_;   // [outputs, hidden + 1]: weights, then the bias
};

void retention_fit::split() {
  const auto& sequences = trace_.sequences();
  const auto count = std::ssize(sequences);
  if (count == 1) {
    first_held_ = static_cast<std::int64_t>(options_.train_share *
                                            static_cast<double>(sequences[0].n_tokens));
    return;
  }
  const auto train = std::clamp<std::int64_t>(
      std::llround(options_.train_share * static_cast<double>(count)), 1, count - 1);
  for (auto i = train; i < count; ++i) held_out_.push_back(sequences[static_cast<size_t>(i)].id);
}

// With one sequence the training part ends at first_held_: entries and the rows that judge them.
void retention_fit::load_layer_examples(size_t slot) {
  const auto kv = static_cast<size_t>(model_.n_kv_heads);
  for (size_t s = 0; s < data_.size(); ++s) {
    const auto& info = trace_.sequences()[s];
    const int layer = model_.layers[slot];
    data_[s][slot] = load_layer(trace_, info.id, layer);
    const auto& data = data_[s][slot];
    const bool whole = held_out_.empty();
    const bool held = !whole && is_held(info.id);
    const std::int64_t cut = whole ? first_held_ : info.n_tokens;
    const auto last = measure_last_ages(trace_, info.id, layer, cut);
    const auto future = whole ? measure_last_ages(trace_, info.id, layer) : last_ages{};
    for (size_t g = 0; g < kv; ++g) {
      auto& gate = gates_[slot * kv + g];
      const auto add = [&](std::int64_t i, std::int64_t end, std::int32_t age,
                           std::vector<example>& to) {
        example e{data.k_at(i) + static_cast<std::int64_t>(g) * model_.head_dim,
                  data.v_at(i) + static_cast<std::int64_t>(g) * model_.value_dim, 0, 0};
        for (std::int64_t a = 1; i + a < end; a *= 2) {
          ++e.ages;
          if (age >= a) e.alive = e.ages;
        }
        if (e.ages > 0) to.push_back(e);
      };
      for (std::int64_t i = 0; i < cut; ++i) {
        add(i, cut, last[g][static_cast<size_t>(i)], held ? gate.held : gate.train);
      }
      for (std::int64_t i = cut; whole && i < info.n_tokens; ++i) {
        add(i, info.n_tokens, future[g][static_cast<size_t>(i)], gate.held);
      }
    }
  }
}

void retention_fit::prepare_head(size_t head) {
  auto& gate = gates_[head];
  const auto kept = static_cast<std::ptrdiff_t>(
      std::ceil((1 - watched_share) * static_cast<double>(gate.train.size())));
  gate.watched.assign(gate.train.begin() + kept, gate.train.end());
  gate.train.resize(static_cast<size_t>(kept));
  gate.mean.assign(inputs_, 0);
  gate.scale.assign(inputs_, 0);
  const auto value = [&](const example& e, size_t c) {
    const auto dim = static_cast<size_t>(model_.head_dim);
    return static_cast<double>(c < dim ? e.k[c] : e.v[c - dim]);
  };
  for (const auto& e : gate.train) {
    for (size_t c = 0; c < inputs_; ++c) gate.mean[c] += value(e, c);
  }
  const auto n = static_cast<double>(gate.train.size());
  for (double& m : gate.mean) m /= n;
  for (const auto& e : gate.train) {
    for (size_t c = 0; c < inputs_; ++c) {
      gate.scale[c] += (value(e, c) - gate.mean[c]) * (value(e, c) - gate.mean[c]);
    }
  }
  for (double& s : gate.scale) s = s > 0 ? 1 / std::sqrt(s / n) : 0;
  // Small distinct weights by seed and head; std's generators and this arithmetic are the same
  // everywhere, its distributions are not.
  std::mt19937_64 random(options_.seed * 1000003 + head);
  const auto uniform = [&] { return static_cast<double>(random() >> 11) * 0x1p-53 * 2 - 1; };
  gate.own.resize(hidden_ * (inputs_ + 1));
  const double spread = 0.1 * std::sqrt(1.0 / static_cast<double>(inputs_));
  for (size_t i = 0; i < hidden_ * inputs_; ++i) gate.own[i] = spread * uniform();
  gate.own_gradient.resize(gate.own.size());
  gate.out_gradient.resize(hidden_ + 1);
  gate.optimiser = std::make_unique<adam>(gate.own.size());
  gate.order.resize(gate.train.size());
  std::iota(gate.order.begin(), gate.order.end(), size_t{0});
  std::vector<std::int32_t> age;
  std::vector<double> alive;
  std::vector<std::int64_t> seen;
  for (const auto& e : gate.train) {
    for (int i = 0; i < e.ages; ++i) {
      const auto at = static_cast<size_t>(i);
      if (age.size() <= at) {
        age.push_back(1 << i);
        alive.push_back(0);
        seen.push_back(0);
      }
      ++seen[at];
      alive[at] += i < e.alive ? 1 : 0;
    }
  }
  for (size_t i = 0; i < age.size(); ++i) alive[i] /= static_cast<double>(seen[i]);
  gate.log_beta = std::log(fit_geometric(age, alive, seen));
}

void retention_fit::load() {
  data_.assign(trace_.sequences().size(), {});
  for (auto& layers : data_) layers.resize(model_.layers.size());
  gates_.resize(heads_);
  tbb::parallel_for(size_t{0}, model_.layers.size(),
                    [&](size_t slot) { load_layer_examples(slot); });
  for (const auto& gate : gates_) {
    if (std::ssize(gate.train) >= fewest_entries && !gate.held.empty()) continue;
    throw traces::trace_error(fmt::format(
        "{}: {} entries to learn from and {} held out per KV head, expected at least {} and 1; "
        "record longer or more sequences",
        trace_.path(), gate.train.size(), gate.held.size(), fewest_entries));
  }
  tbb::parallel_for(size_t{0}, heads_, [&](size_t head) { prepare_head(head); });
}

// ln beta of an example. x and h are left as they were computed, for the gradient.
double retention_fit::forward(const head_gate& gate, std::span<const double> output,
                              const example& e, std::vector<double>& x,
                              std::vector<double>& h) const {
  const auto dim = static_cast<size_t>(model_.head_dim);
  x.resize(inputs_);
  h.resize(hidden_);
  for (size_t c = 0; c < inputs_; ++c) {
    const double raw = c < dim ? e.k[c] : e.v[c - dim];
    x[c] = (raw - gate.mean[c]) * gate.scale[c];
  }
  double z = output[hidden_];
  for (size_t j = 0; j < hidden_; ++j) {
    const double* w = &gate.own[j * inputs_];
    double sum[4] = {gate.own[hidden_ * inputs_ + j], 0, 0, 0};
    size_t c = 0;
    for (; c + 4 <= inputs_; c += 4) {
      for (size_t r = 0; r < 4; ++r) sum[r] += w[c + r] * x[c + r];
    }
    for (; c < inputs_; ++c) sum[0] += w[c] * x[c];
    h[j] = std::tanh((sum[0] + sum[1]) + (sum[2] + sum[3]));
    z += output[j] * h[j];
  }
  return z;
}

// Mean gradient over entries first .. first + count - 1 of the head's order.
void retention_fit::gradient(size_t head, size_t first, size_t count) {
  auto& gate = gates_[head];
  const std::span<const double> output(&output_[output_of(head) * (hidden_ + 1)], hidden_ + 1);
  std::fill(gate.own_gradient.begin(), gate.own_gradient.end(), 0.0);
  std::fill(gate.out_gradient.begin(), gate.out_gradient.end(), 0.0);
  std::vector<double> x, h;
  double weight = 0;
  for (size_t i = first; i < first + count; ++i) weight += gate.train[gate.order[i]].ages;
  for (size_t i = first; i < first + count; ++i) {
    const auto& e = gate.train[gate.order[i]];
    const double z = forward(gate, output, e, x, h);
    const double log_beta = log_sigmoid(z);
    double slope = 0;
    loss_of(e, log_beta, slope);
    const double dz = slope * -std::expm1(log_beta) / weight;  // d ln sigmoid(z) = 1 - beta
    gate.out_gradient[hidden_] += dz;
    for (size_t j = 0; j < hidden_; ++j) {
      gate.out_gradient[j] += dz * h[j];
      const double dh = dz * output[j] * (1 - h[j] * h[j]);
      gate.own_gradient[hidden_ * inputs_ + j] += dh;
      double* w = &gate.own_gradient[j * inputs_];
      for (size_t c = 0; c < inputs_; ++c) w[c] += dh * x[c];
    }
  }
}

// Before the first step every head's gate gives the one decay that fits the head best: the output
// bias is the mean of their logits, hidden biases make up each head's difference from it.
void retention_fit::start_at_constants() {
  const double weight = 1 / std::sqrt(static_cast<double>(hidden_));
  const auto logit = [](double log_beta) {
    return log_beta - std::log(std::max(-std::expm1(log_beta), 1e-12));
  };
  output_.assign(output_count() * (hidden_ + 1), 0);
  for (size_t o = 0; o < output_count(); ++o) {
    double sum = 0, users = 0;
    for (size_t head = 0; head < heads_; ++head) {
      if (output_of(head) != o) continue;
      sum += logit(gates_[head].log_beta);
      ++users;
    }
    double* output = &output_[o * (hidden_ + 1)];
    for (size_t j = 0; j < hidden_; ++j) output[j] = j % 2 == 0 ? weight : -weight;
    output[hidden_] = sum / users;
    for (size_t head = 0; head < heads_; ++head) {
      if (output_of(head) != o) continue;
      const double share = (logit(gates_[head].log_beta) - output[hidden_]) /
                           (weight * static_cast<double>(hidden_));
      for (size_t j = 0; j < hidden_; ++j) {
        gates_[head].own[hidden_ * inputs_ + j] =
            (j % 2 == 0 ? 1 : -1) * std::atanh(std::clamp(share, -0.95, 0.95));
      }
    }
  }
}

// Every step takes a batch of every head at once, so that shared projections see all of them; their
// gradients are added in the order of the heads, whatever thread was first.
void retention_fit::train() {
  start_at_constants();
  adam outputs(output_.size());
  size_t fewest = gates_[0].train.size();
  for (const auto& gate : gates_) fewest = std::min(fewest, gate.train.size());
  const size_t steps = std::max<size_t>(1, fewest / batch);
  double least = std::numeric_limits<double>::infinity();
  keep_best(least);
  for (int epoch = 0; epoch < options_.epochs; ++epoch) {
    tbb::parallel_for(size_t{0}, heads_, [&](size_t head) {
      std::mt19937_64 random(options_.seed * 7919 + head * 104729 + static_cast<size_t>(epoch));
      auto& order = gates_[head].order;
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
    });
    const double rate =
        options_.learning_rate * 0.5 * (1 + std::cos(3.14159265358979 * epoch / options_.epochs));
    for (size_t step = 0; step < steps; ++step) {
      tbb::parallel_for(size_t{0}, heads_, [&](size_t head) {
        const size_t n = gates_[head].train.size() / steps;
        gradient(head, step * n, n);
        gates_[head].optimiser->step(rate, hidden_ * inputs_, gates_[head].own_gradient,
                                     gates_[head].own);
      });
      std::vector<double> sum(output_.size(), 0.0);
      for (size_t head = 0; head < heads_; ++head) {
        for (size_t j = 0; j <= hidden_; ++j) {
          sum[output_of(head) * (hidden_ + 1) + j] += gates_[head].out_gradient[j];
        }
      }
      outputs.step(rate, 0, sum, output_);
    }
    keep_best(least);
    if (options_.progress) options_.progress(epoch + 1, options_.epochs);
  }
  for (auto& gate : gates_) gate.own = gate.best;
  output_ = best_output_;
}

// The weights that the watched entries like best so far: later epochs learn the training part by
// heart.
void retention_fit::keep_best(double& least) {
  const double loss = mean_loss(&head_gate::watched, false);
  if (!(loss < least)) return;
  least = loss;
  for (auto& gate : gates_) gate.best = gate.own;
  best_output_ = output_;
}

double retention_fit::mean_loss(std::vector<example> head_gate::*part, bool constant) const {
  std::vector<double> losses(heads_), counts(heads_);
  tbb::parallel_for(size_t{0}, heads_, [&](size_t head) {
    const auto& gate = gates_[head];
    const std::span<const double> output(&output_[output_of(head) * (hidden_ + 1)], hidden_ + 1);
    std::vector<double> x, h;
    for (const auto& e : gate.*part) {
      double slope = 0;
      const double log_beta =
          constant ? gate.log_beta : log_sigmoid(forward(gate, output, e, x, h));
      losses[head] += loss_of(e, log_beta, slope);
      counts[head] += e.ages;
    }
  });
  return std::accumulate(losses.begin(), losses.end(), 0.0) /
         std::accumulate(counts.begin(), counts.end(), 0.0);
}

void retention_fit::write_gate(fit_outcome& out) const {
  auto& g = out.gate;
  g.layers = static_cast<int>(model_.layers.size());
  g.kv_heads = model_.n_kv_heads;
  g.head_dim = model_.head_dim;
  g.value_dim = model_.value_dim;
  g.hidden = options_.hidden;
  g.outputs = static_cast<int>(output_count());
  const auto append = [](std::vector<float>& to, std::span<const double> from) {
    for (const double x : from) to.push_back(static_cast<float>(x));
  };
  for (const auto& gate : gates_) {
    append(g.input_mean, gate.mean);
    append(g.input_scale, gate.scale);
    append(g.hidden_weight, std::span(gate.own).first(hidden_ * inputs_));
    append(g.hidden_bias, std::span(gate.own).subspan(hidden_ * inputs_));
  }
  for (size_t o = 0; o < output_count(); ++o) {
    append(g.output_weight, std::span(output_).subspan(o * (hidden_ + 1), hidden_));
    g.output_bias.push_back(static_cast<float>(output_[o * (hidden_ + 1) + hidden_]));
  }
}

void retention_fit::write_rows(fit_outcome& out) const {
  out.rows.assign(data_.size(), {});
  for (size_t s = 0; s < data_.size(); ++s) {
    out.rows[s].resize(model_.layers.size());
    tbb::parallel_for(size_t{0}, model_.layers.size(), [&](size_t slot) {
      const auto& data = data_[s][slot];
      auto& rows = out.rows[s][slot];
      for (std::int64_t t = 0; t < data.n_tokens; ++t) {
        for (int g = 0; g < model_.n_kv_heads; ++g) {
          rows.push_back(traces::log_retention(out.gate, static_cast<int>(slot), g,
                                               data.k_at(t) + std::int64_t{g} * model_.head_dim,
                                               data.v_at(t) + std::int64_t{g} * model_.value_dim));
        }
      }
    });
  }
}

// Of one layer of one sequence: one correlation per KV head and moment.
void retention_fit::correlate_head(const fit_outcome& out, int sequence, size_t slot,
                                   std::vector<double>& learned,
                                   std::vector<double>& recent) const {
  const auto at = static_cast<size_t>(sequence);
  const auto& data = data_[at][slot];
  const auto shape = cache_shape_for(model_, {&model_.layers[slot], 1});
  const auto kv = static_cast<size_t>(model_.n_kv_heads);
  const std::int64_t begin = std::max({data.n_prompt, first_held_, data.first_row});
  const std::int64_t length = data.n_tokens - begin;
  if (length < 2) return;
  // [moments][kv_heads][entries]: the mass that comes after.
  std::vector<std::int64_t> times;
  for (int m = 0; m < moments; ++m) times.push_back(begin + m * (length - 1) / moments);
  times.erase(std::unique(times.begin(), times.end()), times.end());
  std::vector<std::vector<std::vector<double>>> future(times.size());
  for (size_t m = 0; m < times.size(); ++m) {
    future[m].assign(kv, std::vector<double>(static_cast<size_t>(times[m] + 1)));
  }
  for_each_row(shape, data, begin, data.n_tokens, [&](const attention_rows& rows) {
    for (size_t m = 0; m < times.size() && times[m] < rows.t; ++m) {
      for (int h = 0; h < shape.q_heads; ++h) {
        auto& sum = future[m][static_cast<size_t>(h / shape.group())];
        const auto row = rows.head(h);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += row[i];
      }
    }
  });
  for (size_t m = 0; m < times.size(); ++m) {
    for (size_t g = 0; g < kv; ++g) {
      std::vector<double> score, age;
      for (std::int64_t i = 0; i <= times[m]; ++i) {
        const double log_beta = out.rows[at][slot][static_cast<size_t>(i) * kv + g];
        score.push_back(static_cast<double>(times[m] - i + 1) * log_beta);
        age.push_back(static_cast<double>(i));
      }
      const double r = reports::spearman(score, future[m][g]);
      if (!std::isfinite(r)) continue;
      learned.push_back(r);
      recent.push_back(reports::spearman(age, future[m][g]));
    }
  }
}

void retention_fit::correlate(fit_outcome& out) const {
  std::vector<std::vector<double>> learned(model_.layers.size()), recent(model_.layers.size());
  tbb::parallel_for(size_t{0}, model_.layers.size(), [&](size_t slot) {
    for (size_t s = 0; s < data_.size(); ++s) {
      if (held_out_.empty() || is_held(trace_.sequences()[s].id)) {
        correlate_head(out, static_cast<int>(s), slot, learned[slot], recent[slot]);
      }
    }
  });
  double n = 0;
  for (size_t slot = 0; slot < learned.size(); ++slot) {
    n += static_cast<double>(learned[slot].size());
    out.rank_correlation += std::accumulate(learned[slot].begin(), learned[slot].end(), 0.0);
    out.recency_correlation += std::accumulate(recent[slot].begin(), recent[slot].end(), 0.0);
  }
  out.rank_correlation /= n;
  out.recency_correlation /= n;
}

fit_outcome retention_fit::run() {
  split();
  load();
  train();
  fit_outcome out;
  out.held_out = held_out_;
  out.first_held = first_held_;
  out.train_loss = mean_loss(&head_gate::train, false);
  out.held_loss = mean_loss(&head_gate::held, false);
  out.held_loss_constant = mean_loss(&head_gate::held, true);
  write_gate(out);
  write_rows(out);
  correlate(out);
  return out;
}

}  // namespace

fit_outcome fit_retention(const traces::reader& trace, const fit_options& options) {
  return retention_fit(trace, options).run();
}

}  // namespace kvreplay::replay
