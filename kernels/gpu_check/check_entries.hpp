// append, select, compact, confidence and value norms against plain host code in double.
#pragma once

#include <algorithm>
#include <map>

#include "kernels/compact_device.cuh"
#include "kernels/confidence_device.cuh"
#include "kernels/gpu_check/check_support.hpp"
#include "kernels/quantise_device.cuh"
#include "kernels/select_device.cuh"
#include "kernels/value_norm_device.cuh"

namespace kvreplay::kernels::gpu_check {

// The smallest half that is at least absmax / 127 and 2^-14.
inline half_bits scalar_for(double absmax) {
  half_bits bits = 0x0400;
  while (127.0 * static_cast<double>(half_to_float(bits)) < absmax) ++bits;
  return bits;
}

// Codes and scalar of a row of halves that differ from `codes` and `scalar`.
inline int differing_codes(const half_bits* x, const std::vector<float>& channel,
                           const std::int8_t* codes, half_bits scalar) {
  float most = 0;
  std::vector<float> scaled;
  for (std::size_t c = 0; c < channel.size(); ++c) {
    scaled.push_back(half_to_float(x[c]) / channel[c]);
    most = std::max(most, std::fabs(scaled.back()));
  }
  int differing = scalar == scalar_for(static_cast<double>(most)) ? 0 : 1;
  for (std::size_t c = 0; c < channel.size(); ++c) {
    const float step = half_to_float(scalar);
    const auto want = static_cast<int>(std::nearbyint(scaled[c] / step));
    differing += codes[c] == std::clamp(want, -127, 127) ? 0 : 1;
  }
  return differing;
}

// A newcomer enters; entries at or before its position - window leave the tail as codes.
inline void check_append(int tail, int dim, int window, report& out) {
  numbers random(static_cast<std::uint64_t>(tail * dim));
  const twin_head head({7, tail, dim, dim}, random, tail + 1);
  const auto k = random.normals(dim), v = random.normals(dim);
  const device_buffer<float> new_k(k), new_v(v);
  const std::int32_t position = 2 * (7 + tail);
  const device_buffer<device::append_head> items(
      std::vector<device::append_head>{{head.on_device(), new_k.get(), new_v.get(), position}});
  launch_append(device::append_batch{items.get(), 1, dim, dim, window, 0, true, true}, {});
  const device::head_storage s = head.read();
  int wrong = s.fault, aged = 0;
  for (const std::int32_t p : head.positions) aged += p <= position - window && p >= 14 ? 1 : 0;
  wrong += s.body == 7 + aged && s.tail == tail + 1 - aged ? 0 : 1;
  const auto positions = head.read(s.body_position, s.body);
  const auto codes = head.read(s.body_k, std::int64_t{s.body} * dim);
  const auto values = head.read(s.body_v, std::int64_t{s.body} * dim);
  const auto k_scale = head.read(s.body_k_scale, s.body);
  const auto v_scale = head.read(s.body_v_scale, s.body);
  for (int i = 7; i < s.body; ++i) {
    const std::int64_t row = std::int64_t{positions[at(i)] / 2 - 7} * dim,
                       slot = std::int64_t{i} * dim;
    wrong += differing_codes(head.tail_k.data() + row, head.k_channel, codes.data() + slot,
                             k_scale[at(i)]);
    wrong += differing_codes(head.tail_v.data() + row, head.v_channel, values.data() + slot,
                             v_scale[at(i)]);
  }
  const auto tail_positions = head.read(s.tail_position, s.tail);
  const auto tail_keys = head.read(s.tail_k, std::int64_t{s.tail} * dim);
  for (int i = 0; i < s.tail; ++i) {
    const std::int32_t p = tail_positions[at(i)];
    for (int c = 0; c < dim; ++c) {
      const half_bits want = p == position ? float_to_half(k[at(c)])
                                           : head.tail_k[at(std::int64_t{p / 2 - 7} * dim + c)];
      wrong += tail_keys[at(std::int64_t{i} * dim + c)] == want ? 0 : 1;
    }
  }
  out.see("append tail " + std::to_string(tail) + " dim " + std::to_string(dim) + " window " +
              std::to_string(window),
          wrong == 0);
}

// Entries that stay, best first: protected, then by score, then the newer.
inline std::vector<int> entries_to_keep(const twin_head& h, int budget, int sinks,
                                        std::int64_t newest) {
  std::vector<int> order(h.positions.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  const auto sink = [&](int e) { return h.positions[at(e)] < sinks; };
  const auto guarded = [&](int e) { return sink(e) || h.positions[at(e)] > newest; };
  const auto kept = static_cast<int>(std::count_if(order.begin(), order.end(), guarded));
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    if (guarded(a) != guarded(b)) return guarded(a);
    if (guarded(a) && kept > budget) {
      if (sink(a) != sink(b)) return sink(a);
      if (sink(a)) return h.positions[at(a)] < h.positions[at(b)];
      return h.positions[at(a)] > h.positions[at(b)];
    }
    if (!guarded(a) && h.scores[at(a)] != h.scores[at(b)]) return h.scores[at(a)] > h.scores[at(b)];
    return h.positions[at(a)] > h.positions[at(b)];
  });
  order.resize(std::min(order.size(), at(budget)));
  std::sort(order.begin(), order.end());
  return order;
}

// Entries of the device's head by position: key row as integers, then the score.
inline int differing_entries(const twin_head& h, const std::vector<int>& kept) {
  const device::head_storage s = h.read();
  const int dim = h.plan.head_dim;
  int wrong = s.body + s.tail == static_cast<int>(kept.size()) ? s.fault : 1;
  std::map<std::int32_t, int> original;
  for (const int e : kept) original[h.positions[at(e)]] = e;
  const auto compare = [&](int n, const auto& positions, const auto& scores, const auto& keys,
                           const auto& host_keys, int first) {
    for (int i = 0; i < n; ++i) {
      const auto found = original.find(positions[at(i)]);
      if (found == original.end()) {
        ++wrong;
        continue;
      }
      const int e = found->second;
      wrong += scores[at(i)] == h.scores[at(e)] ? 0 : 1;
      for (int c = 0; c < dim; ++c) {
        wrong +=
            keys[at(std::int64_t{i} * dim + c)] == host_keys[at(std::int64_t{e - first} * dim + c)]
                ? 0
                : 1;
      }
      original.erase(found);
    }
  };
  compare(s.body, h.read(s.body_position, s.body), h.read(s.body_score, s.body),
          h.read(s.body_k, std::int64_t{s.body} * dim), h.body_k, 0);
  compare(s.tail, h.read(s.tail_position, s.tail), h.read(s.tail_score, s.tail),
          h.read(s.tail_k, std::int64_t{s.tail} * dim), h.tail_k, h.plan.body);
  return wrong + static_cast<int>(original.size());
}

inline void check_select(int n, int budget, int sinks, int recent, report& out) {
  numbers random(static_cast<std::uint64_t>(n * 7 + budget));
  const int tail = std::min(n, 20);
  const twin_head head({n - tail, tail, 64, 64}, random, 0);
  const device_buffer<std::uint8_t> keep(at(n));
  const device_buffer<int> work(at(2 * n));
  const device_buffer<device::select_head> selects(std::vector<device::select_head>{
      {head.on_device(), keep.get(), budget, 0, 0, sinks, recent}});
  const device_buffer<device::compact_head> compacts(
      std::vector<device::compact_head>{{head.on_device(), keep.get(), work.get()}});
  const std::int32_t step = 2 * n;
  launch_select(device::select_batch{selects.get(), 1, step, rank_rule::score, 0, 0}, {});
  launch_compact(device::compact_batch{compacts.get(), 1, 64, 64, n}, {});
  const auto kept = entries_to_keep(head, budget, sinks, std::int64_t{step} - recent);
  out.see("select and compact " + std::to_string(n) + " entries to " + std::to_string(budget) +
              ", protected " + std::to_string(sinks) + " + " + std::to_string(recent),
          differing_entries(head, kept) == 0);
}

inline void check_window(int n, int window, report& out) {
  numbers random(static_cast<std::uint64_t>(n + window));
  const twin_head head({n - n / 3, n / 3, 64, 64}, random, 0);
  const device_buffer<std::uint8_t> keep(at(n));
  const device_buffer<device::window_head> items(
      std::vector<device::window_head>{{head.on_device(), keep.get(), window}});
  const std::int32_t step = 2 * n;
  launch_window(device::window_batch{items.get(), 1, step}, {});
  const auto marks = keep.read();
  int wrong = 0;
  for (int e = 0; e < n; ++e) {
    wrong += (marks[at(e)] == 1) == (head.positions[at(e)] > step - window) ? 0 : 1;
  }
  out.see("window " + std::to_string(window) + " of " + std::to_string(n), wrong == 0);
}

inline void check_confidence(int vocab, int blocks, report& out) {
  numbers random(static_cast<std::uint64_t>(vocab));
  std::vector<float> x = random.normals(vocab + 1);
  for (int i = 0; i < vocab; ++i) x[at(i)] = i % 7 == 1 ? -INFINITY : x[at(i)] * 3 + 300;
  x.back() = nan;
  const device_buffer<float> logits(x);
  const device_buffer<device::logit_state> partial(at(blocks));
  const device_buffer<device::logit_row> rows(at(1));
  launch_confidence(device::confidence_batch{logits.get(), vocab + 1, 1, vocab, blocks,
                                             partial.get(), rows.get()},
                    {});
  const device::logit_row got = rows.read()[0];
  const auto best = std::max_element(x.begin(), x.end() - 1);
  double z = 0, t = 0, second = -INFINITY;
  for (auto i = x.begin(); i != x.end() - 1; ++i) {
    if (i != best) second = std::max(second, static_cast<double>(*i));
    if (std::isinf(*i)) continue;
    const double d = static_cast<double>(*i) - static_cast<double>(*best);
    z += std::exp(d);
    t += d * std::exp(d);
  }
  error_meter meter;
  meter.see(got.entropy, std::log(z) - t / z);
  meter.see(got.margin, static_cast<double>(*best) - second);
  meter.see(got.top, 1 / z);
  meter.see(got.lse, static_cast<double>(*best) + std::log(z));
  meter.see(got.argmax, static_cast<double>(best - x.begin()));
  meter.see(got.bad, 0);
  out.see(
      "confidence of " + std::to_string(vocab) + " logits in " + std::to_string(blocks) + " blocks",
      meter.worst, 2e-5);
}

inline void check_value_norm(int positions, int group, int dim, int hidden, report& out) {
  numbers random(static_cast<std::uint64_t>(hidden));
  const int q_heads = 2 * group;
  const auto v = random.normals(positions * 2 * dim), wo = random.normals(q_heads * dim * hidden);
  const device_buffer<float> values(v), weights(wo), norms(at(positions * q_heads));
  launch_value_norm(device::value_norm_batch{values.get(), weights.get(), norms.get(), positions,
                                             q_heads, 2, dim, hidden},
                    {});
  const auto got = norms.read();
  error_meter meter;
  for (int p = 0; p < positions; ++p) {
    for (int h = 0; h < q_heads; ++h) {
      double norm = 0;
      for (int j = 0; j < hidden; ++j) {
        double dot = 0;
        for (int c = 0; c < dim; ++c) {
          dot += static_cast<double>(v[at((p * 2 + h / group) * dim + c)]) *
                 static_cast<double>(wo[at((h * dim + c) * hidden + j)]);
        }
        norm += std::fabs(dot);
      }
      meter.see(got[at(p * q_heads + h)], norm);
    }
  }
  out.see("value norms of " + std::to_string(positions) + " positions, hidden " +
              std::to_string(hidden),
          meter.worst, 1e-5);
}

// longest: as for check_attend.
inline void check_entries(int longest, report& out) {
  for (const int tail : {1, 31, 33, 129}) {
    for (const int dim : {64, 80, 128}) {
      check_append(tail, dim, 64, out);
      check_append(tail, dim, 1, out);
    }
  }
  for (const int n : {1, 31, 32, 33, 150, 1000, 4097, 32768}) {
    if (n > longest * 8) continue;
    for (const int budget : {1, n / 2 + 1, n + 1}) {
      check_select(n, budget, 4, 20, out);
      check_select(n, budget, 0, 0, out);
    }
  }
  for (const int n : {1, 33, 1000}) {
    check_window(n, 1, out);
    check_window(n, n, out);
  }
  for (const int vocab : {2, 1000, 50257, 151936}) {
    if (vocab > longest * 60) continue;
    for (const int blocks : {1, 8, 32}) check_confidence(vocab, blocks, out);
  }
  check_value_norm(1, 1, 64, 100, out);
  check_value_norm(33, 4, 128, 200, out);
}

}  // namespace kvreplay::kernels::gpu_check
