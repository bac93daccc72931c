// The contiguous layout and pages side by side, on one core: attention over all KV heads of a layer
// whose entries came and went as under a policy, one selection that drops one entry a head, and one
// that drops half. best_us is of the fastest call.
#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include <chrono>
#include <limits>

#include "kernels/test_support.hpp"

namespace kvreplay::kernels {
namespace {

using namespace testing;

struct setting {
  int q_heads, kv_heads, dim, entries, page;
  bool int8;  // hybrid scales, all but the newest 128 entries
};

// `entries` a head after as many again have left one by one: slots and pages are in no order.
kv_cache used_cache(const setting& s) {
  storage_format format = s.int8 ? int8_format(scale_format::hybrid, 128) : storage_format{};
  format.page = s.page;
  kv_cache cache(small_shape(s.q_heads, s.kv_heads, s.dim), format);
  numbers random(1);
  const std::vector<int> budget(static_cast<std::size_t>(s.kv_heads), s.entries);
  for (std::int32_t t = 0; t < 2 * s.entries; ++t) {
    fill(cache, 0, t, 1, random, false);
    select_item item{.cache = &cache, .step = t, .budget = budget.data(), .recent = 64};
    item.rule = rank_rule::hash;
    select(item);
    age(cache, 0, t);
  }
  return cache;
}

// Times `call` alone; `prepare` comes before every one.
template <class Prepare, class Call>
void time_best(benchmark::State& state, Prepare prepare, Call call) {
  using clock = std::chrono::steady_clock;
  double best = std::numeric_limits<double>::max();
  for ([[maybe_unused]] auto _ : state) {
    prepare();
    const auto begin = clock::now();
    call();
    const double seconds = std::chrono::duration<double>(clock::now() - begin).count();
    best = std::min(best, seconds);
    state.SetIterationTime(seconds);
  }
  state.counters["best_us"] = best * 1e6;
}

void attend_layer(benchmark::State& state, const setting& s) {
  const kv_cache cache = used_cache(s);
  const std::vector<float> q = numbers(2).normals(std::int64_t{s.q_heads} * s.dim);
  std::vector<float> o(q.size()), lse(static_cast<std::size_t>(s.q_heads));
  const std::int64_t stride = cache.max_entries(0);
  std::vector<float> mass(static_cast<std::size_t>(stride * s.kv_heads));
  const attend_item item{&cache,     0,           q.data(), o.data(),
                         lse.data(), mass.data(), stride,   mass_layout::mean};
  time_best(
      state, [] {},
      [&] {
        attend({&item, 1});
        benchmark::DoNotOptimize(o.data());
        benchmark::ClobberMemory();
      });
  state.counters["reserved"] = static_cast<double>(cache.reserved_bytes());
  state.counters["payload"] = static_cast<double>(cache.payload_bytes());
}

void select_layer(benchmark::State& state, const setting& s, int budget_each) {
  const kv_cache cache = used_cache(s);
  kv_cache work = cache;
  const std::vector<int> budget(static_cast<std::size_t>(s.kv_heads), budget_each);
  select_item item{.cache = &work, .step = 2 * s.entries, .budget = budget.data(), .recent = 64};
  item.rule = rank_rule::score;
  time_best(
      state, [&] { work = cache; }, [&] { benchmark::DoNotOptimize(select(item).evicted); });
}

void register_setting(const setting& s) {
  const auto name = [&](const char* what) {
    return fmt::format("{}/{}-{}x{}/{}/entries:{}/page:{}", what, s.q_heads, s.kv_heads, s.dim,
                       s.int8 ? "int8" : "fp16", s.entries, s.page);
  };
  const auto add = [&](const char* what, auto... arguments) {
    benchmark::RegisterBenchmark(name(what).c_str(), arguments...)
        ->Unit(benchmark::kMicrosecond)
        ->UseManualTime();
  };
  add("attend", attend_layer, s);
  add("drop_one", select_layer, s, s.entries - 1);
  add("drop_half", select_layer, s, s.entries / 2);
}

void register_all() {
  for (const setting& shape : {setting{9, 3, 64, 0, 0, false}, {32, 8, 128, 0, 0, false}}) {
    for (const bool int8 : {false, true}) {
      for (const int entries : {512, 2048}) {
        for (const int page : {0, 16, 64}) {
          setting s = shape;
          s.int8 = int8;
          s.entries = entries;
          s.page = page;
          register_setting(s);
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
