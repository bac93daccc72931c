// attend against the double reference over the shape table.
#pragma once

#include <algorithm>

#include "kernels/attend_launch.cuh"
#include "kernels/gpu_check/check_support.hpp"
#include "kernels/query_digits.hpp"
#include "kernels/reference.hpp"

namespace kvreplay::kernels::gpu_check {

struct attend_case {
  int group, head_dim, value_dim, entries, tail, splits;
  device::attend_tier tier;
  bool sinks;
};

inline std::string name_of(const attend_case& c) {
  return "attend group " + std::to_string(c.group) + " dim " + std::to_string(c.head_dim) + "/" +
         std::to_string(c.value_dim) + " entries " + std::to_string(c.entries) + " tail " +
         std::to_string(c.tail) + " splits " + std::to_string(c.splits) +
         (c.tier == device::attend_tier::generic ? " generic" : "") + (c.sinks ? " sinks" : "");
}

struct attend_outcome {
  std::vector<float> o, lse, mass, scores;
  int most = 1;
};

constexpr float check_scale = 0.125F, check_decay = 0.75F;

// Two KV heads of different lengths, mean mass, EMA scores.
inline attend_outcome run_attend(const attend_case& c, const std::vector<twin_head>& heads,
                                 const std::vector<float>& q, const std::vector<float>& sinks) {
  const auto count = static_cast<int>(heads.size());
  attend_outcome r;
  for (const twin_head& h : heads) r.most = std::max(r.most, h.plan.body + h.plan.tail);
  const std::int64_t rows = std::int64_t{count} * c.group;
  const device_buffer<float> query(q), sink(sinks),
      o(std::vector<float>(at(rows * c.value_dim), nan)), lse(std::vector<float>(at(rows), nan)),
      mass(std::vector<float>(at(count * r.most), nan)),
      scores(std::vector<float>(at(rows * r.most), nan)),
      partial_o(at(rows * c.splits * c.value_dim)), partial_state(at(rows * c.splits * 2));
  std::vector<device::attend_head> views;
  for (int h = 0; h < count; ++h) {
    views.push_back({heads[at(h)].on_device(), query.get() + h * c.group * c.head_dim,
                     c.sinks ? sink.get() + h * c.group : nullptr,
                     o.get() + h * c.group * c.value_dim, lse.get() + h * c.group,
                     mass.get() + h * r.most});
  }
  const device_buffer<device::attend_head> on_device(views);
  device::attend_batch a;
  a.heads = on_device.get();
  a.head_count = count;
  a.group = c.group;
  a.head_dim = c.head_dim;
  a.value_dim = c.value_dim;
  a.softmax_scale = check_scale;
  a.splits = c.splits;
  a.most_entries = r.most;
  a.reduce = mass_layout::mean;
  a.rule = score_rule::ema;
  a.decay = check_decay;
  a.scores = scores.get();
  a.partial_o = partial_o.get();
  a.partial_state = partial_state.get();
  launch_attend(a, c.tier, {});
  r.o = o.read();
  r.lse = lse.read();
  r.mass = mass.read();
  r.scores = scores.read();
  return r;
}

// New scores of a head as they stand on the device.
inline std::vector<float> scores_of(const twin_head& h) {
  const device::head_storage s = h.read();
  std::vector<float> all = h.read(s.body_score, s.body);
  const std::vector<float> tail = h.read(s.tail_score, s.tail);
  all.insert(all.end(), tail.begin(), tail.end());
  return all;
}

inline double attend_error(const attend_case& c, const std::vector<twin_head>& heads,
                           const std::vector<float>& q, const std::vector<float>& sinks,
                           const attend_outcome& got) {
  error_meter meter;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    const int n = heads[h].plan.body + heads[h].plan.tail;
    std::vector<double> k, v, mass(at(n));
    for (int e = 0; e < n; ++e) {
      const auto key = heads[h].row(e, false), value = heads[h].row(e, true);
      k.insert(k.end(), key.begin(), key.end());
      v.insert(v.end(), value.begin(), value.end());
    }
    for (int g = 0; g < c.group; ++g) {
      const auto row = static_cast<std::int64_t>(h) * c.group + g;
      const auto first = q.begin() + row * c.head_dim;
      const std::vector<double> query(first, first + c.head_dim);
      const double sink = sinks[at(row)];
      const reference_result want =
          reference_attend(query, k, v, c.value_dim, check_scale, c.sinks ? &sink : nullptr);
      meter.see(got.lse[at(row)], want.lse);
      for (int i = 0; i < c.value_dim; ++i) {
        meter.see(got.o[at(row * c.value_dim + i)], want.o[at(i)]);
      }
      for (int e = 0; e < n; ++e) mass[at(e)] += want.mass[at(e)] / c.group;
    }
    const std::vector<float> scores = scores_of(heads[h]);
    for (int e = 0; e < n; ++e) {
      meter.see(got.mass[at(static_cast<std::int64_t>(h) * got.most + e)], mass[at(e)]);
      const double old = heads[h].scores[at(e)];
      meter.see(scores[at(e)],
                old < 0 ? mass[at(e)] : check_decay * old + (1 - check_decay) * mass[at(e)]);
    }
  }
  return meter.worst;
}

// Scores of the body whose bits differ from the host's integers times the same factors.
inline int differing_scores(const attend_case& c, const std::vector<twin_head>& heads,
                            const std::vector<float>& q, const attend_outcome& got) {
  int differing = 0;
  for (std::size_t h = 0; h < heads.size(); ++h) {
    for (int g = 0; g < c.group; ++g) {
      const auto row = static_cast<std::int64_t>(h) * c.group + g;
      std::vector<float> folded(at(c.head_dim));
      for (int i = 0; i < c.head_dim; ++i) {
        folded[at(i)] = q[at(row * c.head_dim + i)] * check_scale * heads[h].k_channel[at(i)];
      }
      digit_row digits;
      split_query(folded.data(), c.head_dim, digits);
      for (int e = 0; e < heads[h].plan.body; ++e) {
        const std::int32_t integer =
            digit_score(digits, heads[h].body_k.data() + e * c.head_dim, c.head_dim);
        const float want = static_cast<float>(integer) * (digits.scale * device::log2_e) *
                           half_to_float(heads[h].k_scale[at(e)]);
        differing += got.scores[at(row * got.most + e)] == want ? 0 : 1;
      }
    }
  }
  return differing;
}

inline void check_attend_case(const attend_case& c, report& out) {
  numbers random(static_cast<std::uint64_t>(c.entries * 16 + c.group));
  std::vector<twin_head> heads;
  const int tail = std::min(c.tail, c.entries), fewer = std::min(3, c.entries - tail);
  heads.emplace_back(head_plan{c.entries - tail, tail, c.head_dim, c.value_dim}, random, 0);
  heads.emplace_back(head_plan{c.entries - tail - fewer, tail, c.head_dim, c.value_dim}, random, 0);
  const auto q = random.normals(2 * c.group * c.head_dim), sinks = random.normals(2 * c.group);
  const attend_outcome got = run_attend(c, heads, q, sinks);
  const bool integers = c.tier == device::attend_tier::automatic && c.head_dim == c.value_dim &&
                        (c.head_dim == 64 || c.head_dim == 128);
  out.see(name_of(c), attend_error(c, heads, q, sinks, got), integers ? 5e-4 : 2e-5);
  if (integers) {
    out.see(name_of(c) + ", integer scores", differing_scores(c, heads, q, got) == 0);
  }
}

// longest: 4097 on a device; less where the checks run on the emulator.
inline void check_attend(int longest, report& out) {
  using device::attend_tier;
  for (const int n : {0, 1, 31, 32, 33, 150, 1000, 4097}) {
    if (n > longest) continue;
    const int splits = n < 100 ? 1 + n % 2 : 5;
    for (const int dim : {64, 128}) {
      for (const int group : {1, 2, 3, 4, 5, 8, 11}) {
        check_attend_case({group, dim, dim, n, 20, splits, attend_tier::automatic, group == 4},
                          out);
      }
      check_attend_case({4, dim, dim, n, 20, splits, attend_tier::generic, false}, out);
      check_attend_case({4, dim, dim, n, n, splits, attend_tier::automatic, false}, out);
      check_attend_case({4, dim, dim, n, 0, splits, attend_tier::automatic, true}, out);
    }
    check_attend_case({5, 80, 80, n, 20, splits, attend_tier::automatic, false}, out);
    check_attend_case({2, 256, 192, n, 20, splits, attend_tier::automatic, true}, out);
    check_attend_case({3, 33, 7, n, 20, splits, attend_tier::automatic, false}, out);
  }
}

}  // namespace kvreplay::kernels::gpu_check
