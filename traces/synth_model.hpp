// The arithmetic behind synth: numbers that are the same on every machine, and the structure of
// queries, keys and values. Internal to traces/.
#pragma once

#include <cstdint>
#include <vector>

#include "traces/synth.hpp"

namespace kvreplay::traces {

// Counter-based: the value depends on (seed, stream, index) alone, so that nothing depends on the
// order of calls. splitmix64's finaliser, three rounds.
double synth_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);  // [0, 1)
// Sum of twelve uniforms minus six: close to a normal, and free of log and cos.
double synth_normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index);

// exp and log from additions, multiplications and divisions alone. The C library's own differ in
// the last bit between machines (it picks code by CPU), and a trace must not.
double portable_exp(double x);  // x <= 700
double portable_log(double x);

// One KV head of one layer of one sequence.
struct synth_head {
  std::vector<double> k, v;  // [tokens, head_dim], [tokens, value_dim]
  std::vector<double> q;     // [tokens, group, head_dim]
};

// How peaked attention and logits are at each step, in [0, 1]: a slow autoregressive process.
std::vector<double> synth_peakedness(std::uint64_t seed, std::int64_t tokens);
// True for the positions that keep drawing attention.
std::vector<bool> synth_heavy(std::uint64_t seed, const synth_options& options);
synth_head make_synth_head(std::uint64_t seed, int layer, int kv_head, const synth_options& options,
                           const std::vector<double>& peakedness, const std::vector<bool>& heavy);

}  // namespace kvreplay::traces
