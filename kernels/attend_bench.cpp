// attend on one core: KV bytes read per second on every path this machine has, beside what a plain
// read of as many bytes reaches in the same run. Each setting is checked against the double
// reference before it is timed. best_GB/s is of the fastest call: what else runs on the machine
// slows calls down, and nothing speeds them up.
#include "kernels/attend.hpp"

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <chrono>
#include <cstring>
#include <limits>

#include "kernels/isa.hpp"
#include "kernels/numerics.hpp"
#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

// Runs `call` under the benchmark's clock and reports the bytes per second of its fastest run.
template <class Call>
void time_best(benchmark::State& state, std::int64_t bytes, Call call) {
  using clock = std::chrono::steady_clock;
  double best = std::numeric_limits<double>::max();
  for ([[maybe_unused]] auto _ : state) {
    const auto begin = clock::now();
    call();
    best = std::min(best, std::chrono::duration<double>(clock::now() - begin).count());
  }
  state.counters["best_GB/s"] = static_cast<double>(bytes) / best * 1e-9;
  state.counters["KV_bytes"] = static_cast<double>(bytes);
}

struct setting {
  int group, dim, entries;
  bool int8;  // hybrid scales, all but the newest 128 entries
};

void attend_entries(benchmark::State& state, isa set, const setting& s) {
  const forced_isa forced(set);
  const cache_shape shape = small_shape(s.group, 1, s.dim);
  kv_cache cache(shape, s.int8 ? int8_format(scale_format::hybrid, 128) : storage_format{});
  numbers random(1);
  fill(cache, 0, 0, s.entries, random, false);
  age(cache, 0, s.entries - 1);
  const std::vector<float> q = random.normals(std::int64_t{shape.q_heads} * s.dim);
  if (!(worst_error(cache, 0, q) <= attend_tolerance(cache, 0, q))) {
    state.SkipWithError("differs from the reference");
    return;
  }
  std::vector<float> o(q.size()), lse(static_cast<std::size_t>(shape.q_heads));
  std::vector<float> mass(static_cast<std::size_t>(s.entries));
  const attend_item item{&cache,     0,           q.data(),  o.data(),
                         lse.data(), mass.data(), s.entries, mass_layout::mean};
  time_best(state, cache.payload_bytes(), [&] {
    attend({&item, 1});
    benchmark::DoNotOptimize(o.data());
    benchmark::ClobberMemory();
  });
}

// Adds up the 16-byte words of as many bytes as an INT8 cache of the setting holds.
void read_bytes(benchmark::State& state, const setting& s) {
  const auto words = static_cast<std::size_t>(s.entries) * static_cast<std::size_t>(s.dim) / 8;
  const std::vector<bits4> data(words, bits4{1, 2, 3, 4});
  time_best(state, static_cast<std::int64_t>(words * sizeof(bits4)), [&] {
    bits4 sum[4] = {};
    for (std::size_t i = 0; i + 4 <= words; i += 4) {
      for (std::size_t j = 0; j < 4; ++j) sum[j] += data[i + j];
    }
    benchmark::DoNotOptimize(sum);
  });
}

void register_all() {
  for (const int entries : {512, 2048}) {
    const setting any{1, 128, entries, true};
    benchmark::RegisterBenchmark(fmt::format("read/entries:{}", entries).c_str(), read_bytes, any);
    for (const isa set : {isa::plain, isa::avx2, isa::avx512}) {
      if (!isa_supported(set)) {
        fmt::print("skipped: this machine has no {}\n", isa_name(set));
        continue;
      }
      for (const int group : {1, 3, 4, 8}) {
        for (const int dim : {64, 128}) {
          for (const bool int8 : {false, true}) {
            const setting s{group, dim, entries, int8};
            const auto name = fmt::format("attend/{}/{}/dim:{}/entries:{}/group:{}", isa_name(set),
                                          int8 ? "int8" : "fp16", dim, entries, group);
            benchmark::RegisterBenchmark(name.c_str(), attend_entries, set, s)
                ->Unit(benchmark::kMicrosecond);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvreplay::kernels

int main(int argc, char** argv) {
  kvreplay::kernels::register_all();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
