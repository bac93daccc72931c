// attend on one core over the shapes of real models at 2k, 8k and 32k entries: one layer of one
// sequence, FP16 and INT8 (hybrid scales, the newest 128 entries FP16). Columns: KV bytes per
// second, and of_roof, the share of what plainly reading as many bytes reaches in the same run.
// Each setting is compared with the double reference before it is timed; the program first checks
// its own clock: twice the entries must take about twice the time, and no call may beat the plain
// read.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <map>

#include "kernels/numerics.hpp"
#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;
using clock_type = std::chrono::steady_clock;

struct model_shape {
  const char* name;
  int q_heads, kv_heads, head_dim;
  bool sinks;
};
constexpr model_shape models[] = {{"gpt2", 12, 12, 64, false},
                                  {"smollm2", 9, 3, 64, false},
                                  {"llama-3.1-8b", 32, 8, 128, false},
                                  {"qwen2.5-14b", 40, 8, 128, false},  // as Qwen2.5-32B
                                  {"gpt-oss-20b", 64, 8, 64, true}};

template <class Call>
double seconds_of(Call call) {
  const auto begin = clock_type::now();
  call();
  return std::chrono::duration<double>(clock_type::now() - begin).count();
}

// The fastest of several reads of `bytes`, in bytes per second.
double read_bandwidth(std::int64_t bytes) {
  static std::map<std::int64_t, double> known;
  double& best = known[bytes];
  if (best > 0) return best;
  const auto words = static_cast<std::size_t>(bytes) / sizeof(bits4);
  const std::vector<bits4> data(words, bits4{1, 2, 3, 4});
  for (int lap = 0; lap < 12; ++lap) {
    const double seconds = seconds_of([&] {
      bits4 sum[4] = {};
      for (std::size_t i = 0; i + 4 <= words; i += 4) {
        for (std::size_t j = 0; j < 4; ++j) sum[j] += data[i + j];
      }
      benchmark::DoNotOptimize(sum);
    });
    best = std::max(best, static_cast<double>(bytes) / seconds);
  }
  return best;
}

struct filled_cache {
  kv_cache cache;
  std::vector<float> q, o, lse, mass;
  std::int64_t stride;

  filled_cache(const model_shape& m, int entries, bool int8)
      : cache(shape_of(m), int8 ? int8_format(scale_format::hybrid, 128) : storage_format{}),
        stride(entries) {
    numbers random(1);
    const auto& s = cache.shape();
    // A few hundred random rows in turn: drawing all of them would take longer than the benchmark.
    const auto rows = random.normals(std::int64_t{397} * s.kv_heads * s.head_dim);
    for (int p = 0; p < entries; ++p) {
      const auto row = [&](int turn) {
        return rows.data() + std::int64_t{turn % 397} * s.kv_heads * s.head_dim;
      };
      const append_item item{&cache, 0, p, row(p), row(p * 7 + 3)};
      append({&item, 1});
    }
    age(cache, 0, entries - 1);
    q = random.normals(std::int64_t{s.q_heads} * s.head_dim);
    o.resize(q.size());
    lse.resize(static_cast<std::size_t>(s.q_heads));
    mass.resize(static_cast<std::size_t>(s.kv_heads * stride));
  }

  static cache_shape shape_of(const model_shape& m) {
    cache_shape shape = small_shape(m.q_heads, m.kv_heads, m.head_dim);
    if (m.sinks) shape.sink_logits.assign(static_cast<std::size_t>(m.q_heads), 0.5F);
    return shape;
  }

  void run() {
    const attend_item item{&cache,     0,           q.data(), o.data(),
                           lse.data(), mass.data(), stride,   mass_layout::mean};
    attend({&item, 1});
    benchmark::DoNotOptimize(o.data());
    benchmark::ClobberMemory();
  }

  // The first and the last query head against the reference.
  bool agrees() {
    run();
    const auto& s = cache.shape();
    const double tolerance = attend_tolerance(cache, 0, q);
    for (const int h : {0, s.q_heads - 1}) {
      const auto want = expected(cache, 0, q, h);
      if (!near(lse[static_cast<std::size_t>(h)], want.lse, tolerance)) return false;
      for (int c = 0; c < s.value_dim; ++c) {
        const auto at = static_cast<std::size_t>(h * s.value_dim + c);
        if (!near(o[at], want.o[static_cast<std::size_t>(c)], tolerance)) return false;
      }
    }
    return true;
  }
};

void attend_shape(benchmark::State& state, const model_shape& m, int entries, bool int8) {
  filled_cache filled(m, entries, int8);
  if (!filled.agrees()) {
    state.SkipWithError("differs from the reference");
    return;
  }
  double best = std::numeric_limits<double>::max();
  for ([[maybe_unused]] auto _ : state) best = std::min(best, seconds_of([&] { filled.run(); }));
  const auto bytes = static_cast<double>(filled.cache.payload_bytes());
  const double roof = read_bandwidth(filled.cache.payload_bytes());
  state.counters["best_GB/s"] = bytes / best * 1e-9;
  state.counters["read_GB/s"] = roof * 1e-9;
  state.counters["of_roof"] = bytes / best / roof;
  state.counters["KV_bytes"] = bytes;
}

// Empty where the clock can be believed.
std::string self_test() {
  const auto best_of = [](filled_cache& filled) {
    double best = std::numeric_limits<double>::max();
    for (int i = 0; i < 50; ++i) best = std::min(best, seconds_of([&] { filled.run(); }));
    return best;
  };
  filled_cache once(models[2], 2048, false), twice(models[2], 4096, false);
  const double single = best_of(once), twofold = best_of(twice);
  if (!(twofold > 1.6 * single && twofold < 3.0 * single)) {
    return fmt::format("2048 entries take {:.3g} s, 4096 take {:.3g} s: not about twice", single,
                       twofold);
  }
  const double rate = static_cast<double>(once.cache.payload_bytes()) / single;
  const double roof = read_bandwidth(once.cache.payload_bytes());
  if (rate > 1.1 * roof) {
    return fmt::format("attention reads {:.3g} B/s, a plain read only {:.3g}", rate, roof);
  }
  return {};
}

void register_all() {
  for (const auto& m : models) {
    for (const int entries : {2048, 8192, 32768}) {
      for (const bool int8 : {false, true}) {
        const auto name = fmt::format("{}/{}/{}x{}/{}/{}", m.name, m.q_heads, m.kv_heads,
                                      m.head_dim, int8 ? "int8" : "fp16", entries);
        benchmark::RegisterBenchmark(name.c_str(), attend_shape, m, entries, int8)
            ->Unit(benchmark::kMicrosecond);
      }
    }
  }
}

}  // namespace
}  // namespace kvreplay::kernels

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  if (const auto doubt = kvreplay::kernels::self_test(); !doubt.empty()) {
    fmt::print(stderr, "shapes_bench: {}\n", doubt);
    return 1;
  }
  fmt::print("instruction set: {}\n", kvreplay::kernels::isa_name(kvreplay::kernels::active_isa()));
  kvreplay::kernels::register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
