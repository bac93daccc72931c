// Whole steps of the device cache: what every step returns, scores and keeps follows in double from
// the entries that the device itself says it holds.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "kernels/device_cache_steps.cuh"
#include "kernels/gpu_check/check_support.hpp"
#include "kernels/reference.hpp"

namespace kvreplay::kernels::gpu_check {

struct cache_plan {
  const char* name;
  int group, kv_heads, dim;
  body_format body;
  device_rules rules;
  int entries, budget, window;  // entries loaded; window of layer 1, 0: global
  int layers = 2, sinks = 2, recent = 4, steps = 12;
};

// Entry rows of a saved head in double, body first.
inline std::vector<double> saved_rows(const head_store& s, int dim, bool values) {
  const auto& codes = values ? s.body_v : s.body_k;
  const auto& scale = values ? s.body_v_scale : s.body_k_scale;
  const auto& channel = values ? s.v_channel_scale : s.k_channel_scale;
  std::vector<double> rows;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    const std::size_t entry = i / at(dim), c = i % at(dim);
    rows.push_back(codes[i] * static_cast<double>(half_to_float(scale[entry])) *
                   (channel.empty() ? 1.0 : static_cast<double>(channel[c])));
  }
  for (const half_bits h : values ? s.tail_v : s.tail_k) rows.push_back(half_to_float(h));
  return rows;
}

class cache_run {
 public:
  explicit cache_run(const cache_plan& plan)
      : plan_(plan), random_(static_cast<std::uint64_t>(plan.entries + plan.dim)) {
    shape_.layers = plan.layers;
    shape_.kv_heads = plan.kv_heads;
    shape_.q_heads = plan.kv_heads * plan.group;
    shape_.head_dim = shape_.value_dim = plan.dim;
    shape_.softmax_scale = 0.125;
    shape_.window.assign(at(plan.layers), 0);
    shape_.window.back() = plan.window;
    format_.body = plan.body;
    format_.tail_window = 40;
    cache_ = std::make_unique<device::cache_on_device>(shape_, format_, plan.rules);
    for (int layer = 0; layer < plan.layers; ++layer) cache_->load(layer, first_entries());
  }

  void run(report& out) {
    for (std::int32_t t = plan_.entries; t < plan_.entries + plan_.steps; ++t) step(t);
    const std::string name = std::string("cache ").append(plan_.name);
    // Tensor cores: 15 bits of the query and FP16 weights.
    out.see(std::string(name).append(", outputs and scores"), meter_.worst, 5e-4);
    out.see(std::string(name).append(", positions"), wrong_ == 0);
  }

 private:
  std::vector<head_store> first_entries() {
    std::vector<head_store> heads(at(plan_.kv_heads));
    for (head_store& h : heads) {
      for (int p = 0; p < plan_.entries; ++p) {
        h.tail_position.push_back(p);
        h.tail_score.push_back(-1);
      }
      for (const float x : random_.normals(plan_.entries * plan_.dim)) {
        h.tail_k.push_back(float_to_half(x));
        h.tail_v.push_back(float_to_half(-x));
      }
      for (int c = 0; plan_.body != body_format::none && c < plan_.dim; ++c) {
        h.k_channel_scale.push_back(static_cast<float>(0.5 + random_.uniform()));
        h.v_channel_scale.push_back(1);
      }
    }
    return heads;
  }

  void step(std::int32_t t) {
    const int q_heads = shape_.q_heads;
    std::vector<std::vector<float>> q, k, v, o, lse;
    std::vector<device_step> items;
    std::vector<device_selection> selections;
    const std::vector<int> budget(at(plan_.kv_heads), plan_.budget);
    for (int l = 0; l < plan_.layers; ++l) {
      q.push_back(random_.normals(q_heads * plan_.dim));
      k.push_back(random_.normals(plan_.kv_heads * plan_.dim));
      v.push_back(random_.normals(plan_.kv_heads * plan_.dim));
      o.emplace_back(at(q_heads * plan_.dim), nan);
      lse.emplace_back(at(q_heads), nan);
    }
    std::vector<std::map<std::int32_t, double>> before;
    for (int l = 0; l < plan_.layers; ++l) {
      const auto i = at(l);
      items.push_back({l, t, q[i].data(), k[i].data(), v[i].data(), o[i].data(), lse[i].data()});
      selections.push_back({l, l, budget.data(), plan_.sinks, plan_.recent});
      for (const head_store& h : saved(l)) before.push_back(scores_of(h));
    }
    cache_->attend(items, true);
    std::vector<std::vector<std::int32_t>> kept;
    for (int l = 0; l < plan_.layers; ++l) {
      const auto heads = saved(l);
      const auto mass = check_outputs(heads, q[at(l)], o[at(l)], lse[at(l)]);
      for (int h = 0; h < plan_.kv_heads; ++h) {
        const head_store& s = heads[at(h)];
        auto& old = before[at(l * plan_.kv_heads + h)];
        check_entries(s, old, mass[at(h)], t, shape_.window_of(l));
        kept.push_back(kept_of(s, t));
      }
    }
    cache_->select(selections);
    for (int l = 0; l < plan_.layers; ++l) {
      const auto held = cache_->held_positions(l);
      for (int h = 0; h < plan_.kv_heads; ++h) {
        auto got = held[at(h)];
        std::sort(got.begin(), got.end());
        wrong_ += got == kept[at(l * plan_.kv_heads + h)] ? 0 : 1;
      }
    }
  }

  std::vector<head_store> saved(int layer) {
    std::vector<head_store> heads(at(plan_.kv_heads));
    cache_->save(layer, heads);
    return heads;
  }

  static std::map<std::int32_t, double> scores_of(const head_store& s) {
    std::map<std::int32_t, double> all;
    for (int e = 0; e < s.size(); ++e) all[s.position(e)] = static_cast<double>(s.score(e));
    return all;
  }

  // Compares o and lse; returns the mean mass, per KV head or over the layer.
  std::vector<std::vector<double>> check_outputs(const std::vector<head_store>& heads,
                                                 const std::vector<float>& q,
                                                 const std::vector<float>& o,
                                                 const std::vector<float>& lse) {
    std::vector<std::vector<double>> mass;
    for (int h = 0; h < plan_.kv_heads; ++h) {
      const auto k = saved_rows(heads[at(h)], plan_.dim, false),
                 v = saved_rows(heads[at(h)], plan_.dim, true);
      mass.emplace_back(at(heads[at(h)].size()));
      for (int g = 0; g < plan_.group; ++g) {
        const int row = h * plan_.group + g;
        const auto first = q.begin() + row * plan_.dim;
        const std::vector<double> query(first, first + plan_.dim);
        const reference_result want =
            reference_attend(query, k, v, plan_.dim, shape_.softmax_scale, nullptr);
        meter_.see(lse[at(row)], want.lse);
        for (int c = 0; c < plan_.dim; ++c) meter_.see(o[at(row * plan_.dim + c)], want.o[at(c)]);
        for (std::size_t e = 0; e < want.mass.size(); ++e) {
          mass.back()[e] += want.mass[e] / plan_.group;
        }
      }
    }
    if (plan_.rules.mass != mass_layout::layer_mean) return mass;
    for (std::size_t e = 0; e < mass[0].size(); ++e) {
      double sum = 0;
      for (const auto& row : mass) sum += row[e] / plan_.kv_heads;
      for (auto& row : mass) row[e] = sum;
    }
    return mass;
  }

  // What was held and the newcomer, without what the window has passed; aged entries in the body;
  // scores that moved by the rule.
  void check_entries(const head_store& s, std::map<std::int32_t, double>& old,
                     const std::vector<double>& mass, std::int32_t t, int window) {
    old[t] = -1;
    if (window > 0) old.erase(old.begin(), old.lower_bound(t - window + 1));
    wrong_ += s.size() == static_cast<int>(old.size()) ? 0 : 1;
    for (int e = 0; e < s.size(); ++e) {
      const std::int32_t p = s.position(e);
      const bool aged = plan_.body != body_format::none && p <= t - 1 - format_.tail_window;
      const auto was = old.find(p);
      if (was == old.end() || aged != (e < s.body_size())) {
        ++wrong_;
        continue;
      }
      const double m = mass[at(e)], score = was->second;
      double want = score;
      if (plan_.rules.update == score_rule::sum) want = (score < 0 ? 0 : score) + m;
      if (plan_.rules.update == score_rule::last) want = m;
      if (plan_.rules.update == score_rule::ema) {
        want = score < 0 ? m : plan_.rules.decay * score + (1 - plan_.rules.decay) * m;
      }
      meter_.see(s.score(e), want);
    }
  }

  // By the scores that the device holds, so that rounding decides nothing here.
  std::vector<std::int32_t> kept_of(const head_store& s, std::int32_t t) const {
    std::vector<int> order(at(s.size()));
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
    const auto guarded = [&](int e) {
      return s.position(e) < plan_.sinks || s.position(e) > t - plan_.recent;
    };
    const bool by_score = plan_.rules.rank == rank_rule::score;
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      if (guarded(a) != guarded(b)) return guarded(a);
      if (by_score && !guarded(a) && s.score(a) != s.score(b)) return s.score(a) > s.score(b);
      return s.position(a) > s.position(b);
    });
    order.resize(std::min(order.size(), at(plan_.budget)));
    std::vector<std::int32_t> positions;
    for (const int e : order) positions.push_back(s.position(e));
    std::sort(positions.begin(), positions.end());
    return positions;
  }

  cache_plan plan_;
  numbers random_;
  cache_shape shape_;
  storage_format format_;
  std::unique_ptr<device::cache_on_device> cache_;
  error_meter meter_;
  int wrong_ = 0;
};

// longest: as for check_attend.
inline void check_cache(int longest, report& out) {
  device_rules position, sum, ema, last;
  sum.mass = mass_layout::mean;
  sum.update = score_rule::sum;
  sum.rank = rank_rule::score;
  ema = sum;
  ema.update = score_rule::ema;
  ema.decay = 0.9F;
  last = sum;
  last.mass = mass_layout::layer_mean;
  last.update = score_rule::last;
  last.one_set = true;
  const int n = longest;
  for (const cache_plan& plan : {
           cache_plan{"streaming, dim 80", 3, 2, 80, body_format::none, position, n, n / 2, 0},
           cache_plan{"full, INT8", 4, 2, 128, body_format::int8, position, n, 1 << 20, 0},
           cache_plan{"window of a layer", 2, 2, 64, body_format::int8, sum, n, 24, 20},
           cache_plan{"EMA, INT8", 4, 2, 64, body_format::int8, ema, n, n - 3, 0},
           cache_plan{"layer mean", 3, 3, 64, body_format::int8, last, n, n / 2 + 8, 0},
       }) {
    cache_run(plan).run(out);
  }
}

}  // namespace kvreplay::kernels::gpu_check
