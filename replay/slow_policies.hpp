// For tests: policies once more, literally from their definitions, in double and without a thought
// for speed. Shares with the replayer the trace reader, the parsed SPEC and the pyramid's shares.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/half.hpp"
#include "policies/budget.hpp"
#include "policies/policy.hpp"
#include "replay/bind.hpp"
#include "replay/policy_sets.hpp"

namespace kvreplay::replay {

class slow_replay {
 public:
  slow_replay(const traces::reader& trace, const policies::policy& policy)
      : trace_(trace),
        m_(trace.model()),
        p_(policy),
        T_(trace.sequence(0).n_tokens),
        P_(trace.sequence(0).n_prompt) {
    for (const int l : m_.layers) {
      auto slice = trace.read_layer(0, l, 0, T_);
      layer at;
      at.q = widen(slice.q);
      at.k = widen(slice.k);
      at.retention.assign(slice.retention.begin(), slice.retention.end());
      at.norm.assign(slice.value_norm.begin(), slice.value_norm.end());
      layers_.push_back(std::move(at));
    }
  }

  kept_map run() {
    for (int l = 0; l < layers(); ++l) {
      for (int g = 0; g < m_.n_kv_heads; ++g) {
        for (int t = 0; t < P_; ++t) {
          rows_[{l, g}].push_back(mass(l, g, t, visible(l, t)));
        }
        for (const int i : visible(l, static_cast<int>(P_) - 1)) held_[{l, g}].insert(i);
      }
    }
    kept_map out;
    settle(static_cast<int>(P_) - 1, out);
    for (int t = static_cast<int>(P_); t < T_; ++t) {
      for (int l = 0; l < layers(); ++l) {
        for (int g = 0; g < m_.n_kv_heads; ++g) {
          auto& held = held_[{l, g}];
          held.insert(t);
          const auto seen = visible(l, t);
          while (*held.begin() < seen.front()) held.erase(held.begin());
        }
        for (int g = 0; g < m_.n_kv_heads; ++g) {
          const auto& held = held_[{l, g}];
          rows_[{l, g}].push_back(mass(l, g, t, {held.begin(), held.end()}));
        }
      }
      settle(t, out);
    }
    return out;
  }

 private:
  using head_key = std::pair<int, int>;  // slot, KV head
  using row = std::map<int, double>;     // position -> mass
  struct layer {
    std::vector<double> q, k, retention, norm;
  };
  struct ranked {
    double score;
    int position, slot, head;
    bool operator<(const ranked& o) const {  // the better first
      if (score != o.score) return score > o.score;
      if (position != o.position) return position > o.position;
      return std::pair(slot, head) < std::pair(o.slot, o.head);
    }
  };

  static std::vector<double> widen(const std::vector<traces::half_bits>& bits) {
    std::vector<double> out;
    for (const auto b : bits) out.push_back(static_cast<double>(kernels::half_to_float(b)));
    return out;
  }
  int layers() const { return static_cast<int>(layers_.size()); }
  std::vector<int> visible(int l, int t) const {
    const int w = m_.window.empty() ? 0 : m_.window[static_cast<size_t>(l)];
    std::vector<int> out;
    for (int i = w > 0 ? std::max(0, t - w + 1) : 0; i <= t; ++i) out.push_back(i);
    return out;
  }
  double logit(int l, int h, int t, int i) const {
    const auto d = static_cast<size_t>(m_.head_dim);
    const double* q =
        &layers_[static_cast<size_t>(l)].q[static_cast<size_t>(t * m_.n_q_heads + h) * d];
    const double* k = key(l, h / m_.group(), i);
    double dot = 0;
    for (size_t c = 0; c < d; ++c) dot += q[c] * k[c];
    return dot * m_.softmax_scale;
  }
  const double* key(int l, int g, int i) const {
    return &layers_[static_cast<size_t>(l)]
                .k[static_cast<size_t>(i * m_.n_kv_heads + g) * static_cast<size_t>(m_.head_dim)];
  }
  row attention(int l, int h, int t, const std::vector<int>& over) const {
    double sum =
        m_.sinks.empty()
            ? 0
            : std::exp(static_cast<double>(m_.sinks[static_cast<size_t>(l * m_.n_q_heads + h)]));
    row out;
    for (const int i : over) sum += out[i] = std::exp(logit(l, h, t, i));
    for (auto& [i, a] : out) a /= sum;
    return out;
  }
  // Reduced over the group, or over the layer.
  row mass(int l, int g, int t, const std::vector<int>& over) const {
    const bool whole = p_.score.scope == policies::score_scope::layer;
    const int first = whole ? 0 : g * m_.group(), n = whole ? m_.n_q_heads : m_.group();
    row out;
    for (int h = first; h < first + n; ++h) {
      for (const auto& [i, a] : attention(l, h, t, over)) {
        if (p_.score.gqa == policies::group_reduce::max) {
          out[i] = std::max(out[i], a);
        } else {
          out[i] += p_.score.gqa == policies::group_reduce::sum ? a : a / n;
        }
      }
    }
    return out;
  }

  std::vector<double> pooled(std::vector<double> x) const {
    const int reach = p_.score.kernel / 2, n = static_cast<int>(x.size());
    std::vector<double> out;
    for (int i = 0; i < n; ++i) {
      double best = -INFINITY, sum = 0;
      for (int j = std::max(0, i - reach); j <= std::min(n - 1, i + reach); ++j) {
        best = std::max(best, x[static_cast<size_t>(j)]);
        sum += x[static_cast<size_t>(j)];
      }
      out.push_back(p_.score.pool == policies::pool_kind::max ? best : sum / p_.score.kernel);
    }
    return out;
  }
  std::vector<double> importance(int l, int g, int t, const std::vector<int>& held) const {
    std::vector<double> sum(held.size(), 0.0), count(held.size(), 0.0);
    for (int s = std::max(0, t - p_.score.obs + 1); s <= t; ++s) {
      double total = 0;
      std::vector<double> e;
      for (const int i : held) {
        double best = -INFINITY;
        for (int h = g * m_.group(); h < (g + 1) * m_.group(); ++h)
          best = std::max(best, logit(l, h, s, i));
        e.push_back(i <= s ? std::exp(best) : 0);
        total += e.back();
      }
      for (size_t n = 0; n < held.size() && total > 0; ++n) {
        if (held[n] > s) continue;
        sum[n] += e[n] / total;
        ++count[n];
      }
    }
    for (size_t n = 0; n < held.size(); ++n) sum[n] = count[n] > 0 ? sum[n] / count[n] : 0;
    return pooled(sum);
  }
  double cosine(const double* a, const double* b) const {
    double ab = 0, aa = 0, bb = 0;
    for (int c = 0; c < m_.head_dim; ++c) {
      ab += a[c] * b[c];
      aa += a[c] * a[c];
      bb += b[c] * b[c];
    }
    return ab / std::sqrt(aa * bb);
  }
  std::vector<double> redundancy(int l, int g, const std::vector<int>& held) const {
    const size_t n = held.size();
    std::vector<double> mean(n, 0.0);
    for (size_t i = 0; i < n; ++i) {
      size_t spared = n;
      for (size_t j = 0; j < n; ++j) {
        if (j != i && cosine(key(l, g, held[i]), key(l, g, held[j])) > 0.5) spared = j;
      }
      for (size_t j = 0; j < n; ++j) {
        if (j != i && j != spared)
          mean[j] += cosine(key(l, g, held[i]), key(l, g, held[j])) / static_cast<double>(n);
      }
    }
    double sum = 0;
    for (double& x : mean) sum += x = std::exp(x);
    for (double& x : mean) x /= sum;
    return mean;
  }

  // What the held entries are worth after step t, in order of position.
  std::vector<double> worth(int l, int g, int t) const {
    using policies::score_kind;
    const auto& set = held_.at({l, g});
    const std::vector<int> held(set.begin(), set.end());
    const auto& rows = rows_.at({l, g});
    const auto& at = layers_[static_cast<size_t>(l)];
    std::vector<double> out;
    std::vector<double> extra, mean(static_cast<size_t>(m_.head_dim), 0.0);
    if (p_.score.kind == score_kind::redundancy) {
      out = importance(l, g, t, held);
      extra = redundancy(l, g, held);
      for (size_t n = 0; n < out.size(); ++n) {
        out[n] = p_.score.lambda * out[n] - (1 - p_.score.lambda) * extra[n];
      }
      return out;
    }
    for (const int i : held) {
      for (int c = 0; c < m_.head_dim; ++c) mean[static_cast<size_t>(c)] += key(l, g, i)[c];
    }
    for (const int i : held) {
      double x = 0, seen = 0;
      switch (p_.score.kind) {
        case score_kind::sum:
          for (const auto& r : rows) x += r.count(i) > 0 ? r.at(i) : 0;
          break;
        case score_kind::last:
          x = rows.back().at(i);
          break;
        case score_kind::observed:
          for (int s = std::max(0, t - p_.score.obs + 1); s <= t; ++s) {
            const auto& r = rows[static_cast<size_t>(s)];
            if (r.count(i) == 0) continue;
            x += r.at(i);
            ++seen;
          }
          x = seen > 0 ? x / seen : 0;
          break;
        case score_kind::history:
          for (int s = std::max(0, t - p_.score.history + 1); s <= t; ++s) {
            const auto& r = rows[static_cast<size_t>(s)];
            // 1e-5: an even share rounded down is no low one.
            if (r.count(i) > 0 && r.at(i) < (1 - 1e-5) / static_cast<double>(r.size())) --x;
          }
          break;
        case score_kind::retention:
          x = (t - i + p_.score.age_offset) *
              at.retention[static_cast<size_t>(i * m_.n_kv_heads + g)];
          if (p_.score.exponential) x = std::exp(x);
          break;
        case score_kind::key_norm:
          for (int c = 0; c < m_.head_dim; ++c) x -= key(l, g, i)[c] * key(l, g, i)[c];
          break;
        case score_kind::key_difference:
          x = -cosine(key(l, g, i), mean.data());
          break;
        case score_kind::future:
          for (int s = t + 1; s < T_; ++s) {
            const auto all = visible(l, s);
            if (all.front() <= i) x += mass_at(l, g, s, i);
          }
          break;
        default:
          break;
      }
      out.push_back(x);
    }
    return p_.score.kind == score_kind::observed ? pooled(out) : out;
  }
  double mass_at(int l, int g, int s, int i) const {
    auto& known = future_[{l, g}];
    if (known.empty()) known.resize(static_cast<size_t>(T_));
    auto& r = known[static_cast<size_t>(s)];
    if (r.empty()) r = mass(l, g, s, visible(l, s));
    return r.at(i);
  }

  bool guarded(int t, int i, const policies::protection& protect) const {
    return i < protect.sinks || i > t - protect.recent;
  }

  void settle(int t, kept_map& out) {
    const policies::budget_plan plan(p_, dims_for(m_));
    if (plan.selects(t, P_)) {
      if (p_.budget.division.kind == policies::division_kind::global) {
        std::vector<head_key> all;
        for (int l = 0; l < layers(); ++l) {
          for (int g = 0; g < m_.n_kv_heads; ++g) all.push_back({l, g});
        }
        select(t, all, plan);
      } else {
        for (int l = 0; l < layers(); ++l) {
          std::vector<head_key> own;
          for (int g = 0; g < m_.n_kv_heads; ++g) own.push_back({l, g});
          select(t, own, plan);
        }
      }
    }
    for (const auto& [at, held] : held_) {
      out[{t, m_.layers[static_cast<size_t>(at.first)], at.second}] = {held.begin(), held.end()};
    }
  }

  // Heads that share a budget, or do not.
  void select(int t, const std::vector<head_key>& heads, const policies::budget_plan& plan) {
    using policies::division_kind;
    const auto& division = p_.budget.division;
    const int b = plan.even_budget(t, heads[0].first, 0, false);
    const auto protect = plan.protect(b);
    std::map<head_key, int> own;  // entries that compete and may stay
    std::map<head_key, std::vector<ranked>> lists;
    int held = 0;
    for (const auto& at : heads) {
      const auto score = worth(at.first, at.second, t);
      size_t n = 0;
      int safe = 0;
      for (const int i : held_[at]) {
        if (guarded(t, i, protect)) {
          ++safe;
        } else {
          lists[at].push_back({score[n], i, at.first, at.second});
        }
        ++n;
      }
      std::sort(lists[at].begin(), lists[at].end());
      held += static_cast<int>(n);
      int budget = b;
      if (division.kind == division_kind::table) {
        const int w = std::min(b, protect.sinks + protect.recent), f = b - w;
        const double base = std::floor(f / division.beta);
        const double pool = base * m_.n_layers * m_.n_kv_heads;
        const double share =
            division.shares[static_cast<size_t>(at.first * m_.n_kv_heads + at.second)];
        budget = static_cast<int>(std::nearbyint(share * pool + f - base)) + w;
      }
      if (p_.budget.drop > 0 && static_cast<int>(n) > budget) {
        budget = std::max(1, budget - static_cast<int>(std::floor(p_.budget.drop * budget)));
      }
      own[at] = std::max(0, budget - safe);
    }
    const int total = b * static_cast<int>(heads.size());
    if (division.kind == division_kind::adaptive || division.kind == division_kind::global) {
      if (held <= total) return;
      divide(own, lists, total);
    }
    for (const auto& at : heads) {
      auto& list = lists[at];
      int n = own[at];
      if (p_.critical.on && static_cast<int>(list.size()) > n) two_stages(list, n);
      for (size_t i = static_cast<size_t>(n); i < list.size(); ++i)
        held_[at].erase(list[i].position);
    }
  }

  // One entry at a time to the best that is left.
  void divide(std::map<head_key, int>& own, std::map<head_key, std::vector<ranked>>& lists,
              int total) {
    const auto& division = p_.budget.division;
    const auto free = own;
    int left = 0, safe = 0;
    for (auto& [at, n] : own) {
      safe += static_cast<int>(held_[at].size() - lists[at].size());
      left += n;
    }
    if (division.kind == policies::division_kind::global) left = total - safe;
    for (auto& [at, n] : own) {
      int first =
          division.kind == policies::division_kind::global
              ? std::max(0, division.least - static_cast<int>(held_[at].size() - lists[at].size()))
              : std::min(n, std::max(1, static_cast<int>(std::floor(division.floor * n))));
      if (division.blend) first = 0;
      n = std::min(first, static_cast<int>(lists[at].size()));
      left -= n;
    }
    for (; left > 0; --left) {
      const ranked* best = nullptr;
      for (auto& [at, list] : lists) {
        const auto next = static_cast<size_t>(own[at]);
        if (next < list.size() && (best == nullptr || list[next] < *best)) best = &list[next];
      }
      if (best == nullptr) break;
      ++own[{best->slot, best->head}];
    }
    for (auto& [at, n] : own) {
      if (!division.blend) break;
      n = static_cast<int>(
          std::nearbyint(n * (1 - division.floor) + std::floor(division.floor * free.at(at))));
      n = std::min(n, static_cast<int>(lists[at].size()));
    }
  }

  void two_stages(std::vector<ranked>& list, int n) const {
    const auto first = static_cast<std::ptrdiff_t>(std::floor(p_.critical.first * n));
    double sum = 0;
    for (const auto& r : list) sum += r.score;
    for (auto& r : list) {
      const bool whole = p_.score.scope == policies::score_scope::layer;
      const int from = whole ? 0 : r.head * m_.group(), count = whole ? m_.n_q_heads : m_.group();
      double norm = 0;
      for (int h = from; h < from + count; ++h) {
        norm += layers_[static_cast<size_t>(r.slot)]
                    .norm[static_cast<size_t>(r.position * m_.n_q_heads + h)] /
                count;
      }
      r.score = ((sum > 0 ? r.score / sum : 0) + p_.critical.epsilon) * norm;
    }
    std::sort(list.begin() + first, list.end());
  }

  const traces::reader& trace_;
  const traces::model_info& m_;
  const policies::policy& p_;
  std::int64_t T_, P_;
  std::vector<layer> layers_;
  std::map<head_key, std::vector<row>> rows_;  // by position of the query
  std::map<head_key, std::set<int>> held_;
  mutable std::map<head_key, std::vector<row>> future_;
};

}  // namespace kvreplay::replay
