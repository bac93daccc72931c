// attend on one core: KV bytes read per second, FP16 against INT8. Each setting is checked against
// the double reference before it is timed.
#include "kernels/attend.hpp"

#include <benchmark/benchmark.h>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

// Arguments: group, head_dim, entries, 1 for INT8 (hybrid, all but the newest 128).
void attend_entries(benchmark::State& state) {
  constexpr int kv_heads = 2;
  const int group = static_cast<int>(state.range(0)), dim = static_cast<int>(state.range(1));
  const int entries = static_cast<int>(state.range(2));
  const cache_shape shape = small_shape(group * kv_heads, kv_heads, dim);
  kv_cache cache(shape,
                 state.range(3) != 0 ? int8_format(scale_format::hybrid, 128) : storage_format{});
  numbers random(1);
  fill(cache, 0, 0, entries, random, false);
  age(cache, 0, entries - 1);
  const std::vector<float> q = random.normals(std::int64_t{shape.q_heads} * dim);
  if (!(worst_error(cache, 0, q) <= 1e-5)) {
    state.SkipWithError("differs from the reference");
    return;
  }
  std::vector<float> o(q.size()), lse(static_cast<std::size_t>(shape.q_heads));
  std::vector<float> mass(static_cast<std::size_t>(kv_heads * entries));
  const attend_item item{&cache,     0,           q.data(), o.data(),
                         lse.data(), mass.data(), entries,  mass_layout::mean};
  for ([[maybe_unused]] auto _ : state) {
    attend({&item, 1});
    benchmark::DoNotOptimize(o.data());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * cache.payload_bytes());
}

BENCHMARK(attend_entries)
    ->ArgNames({"group", "dim", "entries", "int8"})
    ->ArgsProduct({{1, 3, 4}, {64, 128}, {512, 2048}, {0, 1}})
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace kvreplay::kernels

BENCHMARK_MAIN();
