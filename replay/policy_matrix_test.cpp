// Every registered policy and a hundred random compositions through the properties at the end of
// POLICIES, over traces with grouped heads, windows, learned sinks, one layer, a one-token prompt,
// and budgets of 1, below the protected part, small, and above the length.
#include <doctest/doctest.h>
#include <fmt/format.h>
#include <tbb/global_control.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "policies/budget.hpp"
#include "policies/catalogue.hpp"
#include "policies/random_bits.hpp"
#include "replay/bind.hpp"
#include "replay/policy_sets.hpp"
#include "replay/test_support.hpp"
#include "replay/trace_copy.hpp"
#include "reports/result.hpp"

namespace kvreplay::replay {
namespace {

// A table of head scores for a traced model, in which heads differ.
void write_head_table(const std::string& path, const traces::model_info& model) {
  std::ofstream out(path);
  out << R"({"schema": "kvreplay.headscores/1", "scores": [)";
  for (int l = 0; l < model.n_layers; ++l) {
    out << (l > 0 ? ", [" : "[");
    for (int h = 0; h < model.n_q_heads; ++h) out << (h > 0 ? ", " : "") << 1 + (3 * l + 5 * h) % 7;
    out << "]";
  }
  out << "]}";
}

// Every policy that ranks, with small parameters that fit traces of 96 positions. {B} is the
// budget, {T} the head table.
const std::vector<std::string> ranking{
    "window:budget={B}",
    "streaming:budget={B}",
    "random:budget={B},recent=2",
    "h2o:budget={B}",
    "h2o:budget={B},gqa=max",
    "h2o:budget={B},scope=layer",
    "scissorhands:budget={B},history=70,recent=2",
    "scissorhands:budget={B},history=5,drop=0,recent=0,scope=layer",
    "tova:budget={B}",
    "snapkv:budget={B},obs=4,kernel=3",
    "snapkv:budget={B},obs=3,pool=avg,gqa=max+every:n=1",
    "pyramidkv:budget={B},obs=4+every:n=8",
    "adakv:budget={B},obs=4",
    "adakv:budget={B},obs=4,mode=blend+every:n=2",
    "headkv:budget={B},obs=4,table={T}+every:n=1",
    "rkv:budget={B},obs=3+every:n=16",
    "trimkv:budget={B}",
    "trimkv:budget={B},age_offset=2,score=exp+every:n=1",
    "dbtrimkv:budget={B}",
    "dbtrimkv:budget={B},floor=2,age_offset=2",
    "oracle:budget={B}",
    "knorm:budget={B}",
    "keydiff:budget={B}",
    "confkv:high={B},low=20,recent=1,obs=4",
    "confkv-l:high={B},low=20,recent=0,obs=4,total=2",
    "h2o:budget={B}+critical",
    "tova:budget={B}+critical:first=0.3",
    "snapkv:budget={B},obs=4+critical:epsilon=0",
    "adakv:budget={B},obs=4+critical+every:n=4",
    "h2o:budget={B}+global:floor=1",
    "h2o:budget={B}+adakv:floor=0.5+pyramid:total=2",
    "trimkv:budget={B}+int8:window=6",
    "snapkv:budget={B},obs=4+every:n=1+int8:window=6,scales=channel"};

std::string filled(std::string spec, const std::string& budget, const std::string& table) {
  const auto replace = [&](const std::string& from, const std::string& to) {
    const auto at = spec.find(from);
    if (at != std::string::npos) spec.replace(at, from.size(), to);
  };
  replace("{B}", budget);
  replace("{T}", table);
  return spec;
}

std::vector<std::string> all_ranking(const std::string& budget, const std::string& table) {
  std::vector<std::string> out;
  for (const auto& spec : ranking) out.push_back(filled(spec, budget, table));
  return out;
}

// One random composition, or empty where the draw does not fit together.
std::string random_spec(std::uint64_t seed, std::uint64_t draw, const std::string& table) {
  std::uint64_t used = 0;
  const auto pick = [&](std::uint64_t n) { return policies::random_bits(seed, draw, used++) % n; };
  const char* budgets[] = {"1", "3", "7", "12", "25%", "40", "1000", "2kB"};
  std::string spec = filled(ranking[pick(ranking.size())], budgets[pick(8)], table);
  const char* extra[] = {"+protect:sinks=2,recent=3",
                         "+protect:sinks=5",
                         "+critical",
                         "+critical:first=0.25,epsilon=0",
                         "+adakv:floor=0.1",
                         "+global:floor=3",
                         "+every:n=5",
                         "+prefill",
                         "+pyramid:total=3,beta=3",
                         "+int8:window=5",
                         "+int8:window=0,scales=token",
                         "+paged:size=4"};
  for (int i = 0; i < 3; ++i) {
    if (pick(3) > 0) spec += extra[pick(std::size(extra))];
  }
  try {
    (void)policies::parse_policy(spec);
  } catch (const policies::spec_error&) {
    return {};
  }
  return spec;
}

std::vector<std::string> random_specs(std::uint64_t seed, size_t count, const std::string& table) {
  std::set<std::string> specs;
  for (std::uint64_t draw = 0; specs.size() < count; ++draw) {
    if (auto spec = random_spec(seed, draw, table); !spec.empty()) specs.insert(spec);
  }
  return {specs.begin(), specs.end()};
}

traces::synth_options rich_options(trace_kind kind, std::uint64_t seed) {
  auto o = options_for(kind, seed);
  o.retention = o.value_norm = o.wo = true;
  return o;
}

constexpr trace_kind kinds[] = {trace_kind::grouped, trace_kind::windowed, trace_kind::sinks,
                                trace_kind::one_layer, trace_kind::one_token_prompt};

struct matrix_trace {
  temporary_folder folder;
  std::string table = folder / "heads.json";
  traces::reader trace;
  explicit matrix_trace(trace_kind kind, std::uint64_t seed = 11)
      : trace((traces::synth(folder / "t.h5", rich_options(kind, seed)), folder / "t.h5")) {
    write_head_table(table, trace.model());
  }
};

// A pyramid may find a budget too small for its protected parts; that is a refusal by name.
bool refused_by_budget(const lane_output& lane) {
  return lane.row.status == "failed" && (lane.row.note.find("too few") != std::string::npos ||
                                         lane.row.note.find("fewer than") != std::string::npos ||
                                         lane.row.note.find("less than one") != std::string::npos);
}

void check_subsets(const traces::reader& trace, const policies::policy& policy, bool degenerate,
                   const kept_map& sets) {
  for (const auto& [key, positions] : sets) {
    const auto [step, layer, head] = key;
    CHECK(std::is_sorted(positions.begin(), positions.end()));
    // Sinks come before the newest where both do not fit.
    if (policy.protect.recent >= 1 && !(degenerate && policy.protect.sinks > 0)) {
      const bool newest = !positions.empty() && positions.back() == step;
      CHECK(newest);
    }
    if (step == trace.sequence(0).n_prompt - 1) continue;
    auto possible = sets.at({step - 1, layer, head});
    possible.push_back(static_cast<std::int32_t>(step));
    CHECK(std::includes(possible.begin(), possible.end(), positions.begin(), positions.end()));
  }
}

double mean_held(const traces::reader& trace, const kept_map& sets, std::int64_t step) {
  double held = 0, heads = 0;
  for (const int layer : trace.model().layers) {
    for (int head = 0; head < trace.model().n_kv_heads; ++head, ++heads) {
      held += static_cast<double>(sets.at({step, layer, head}).size());
    }
  }
  return held / heads;
}

// Whatever was selected holds no more than the step's budget; after the prompt exactly it, where
// the prompt was longer and its mean is a whole budget.
void check_budgets(const matrix_trace& m, const policies::policy& policy, const lane_output& lane,
                   const kept_map& sets) {
  const auto& division = policy.budget.division;
  // The published rounding may spend up to half an entry a head more.
  const double slack =
      division.kind == policies::division_kind::adaptive && division.blend ? 0.5 : 0;
  for (const auto& step : lane.steps) {
    if (step.budget) CHECK(mean_held(m.trace, sets, step.step) <= *step.budget + slack + 1e-9);
  }
  const std::int64_t last = m.trace.sequence(0).n_prompt - 1;
  if (policy.budget.gated || division.kind == policies::division_kind::table) return;
  const policies::budget_plan plan(policy, dims_for(m.trace.model()));
  double allowed = 0;
  const auto layers = static_cast<double>(m.trace.model().layers.size());
  for (const int layer : m.trace.model().layers) {
    allowed += plan.even_budget(last, layer, static_cast<int>(last + 1), false) / layers;
  }
  CHECK(mean_held(m.trace, sets, last) <= allowed + slack + 1e-9);
  // Exact totals: what scores divide is spent to the last entry.
  const bool whole = m.trace.model().window == std::vector<int>(m.trace.model().window.size(), 0);
  const bool exact =
      division.kind != policies::division_kind::uniform && slack == 0 && policy.budget.drop == 0;
  if (whole && exact && allowed * layers <= static_cast<double>(last + 1)) {
    CHECK(mean_held(m.trace, sets, last) == doctest::Approx(allowed));
  }
}

void check_all(const matrix_trace& m, const std::vector<std::string>& specs) {
  const auto policies = parse_all(specs);
  open_loop_options options;
  options.kept = options.per_step = true;
  const auto lanes = replay_open(m.trace, 0, policies, options);
  for (size_t i = 0; i < lanes.size(); ++i) {
    CAPTURE(specs[i]);
    if (refused_by_budget(lanes[i])) continue;
    REQUIRE_MESSAGE(lanes[i].row.status == "ok", lanes[i].row.note);
    const auto sets = kept_sets(m.trace, lanes[i]);
    const bool degenerate = lanes[i].row.note.find("degenerate") != std::string::npos;
    check_subsets(m.trace, policies[i], degenerate, sets);
    check_budgets(m, policies[i], lanes[i], sets);
    const auto& q = lanes[i].row.quality;
    CHECK(*q.attention_recall <= *q.recall_bound + 1e-6);
    CHECK(*q.attention_recall >= 0);
  }
}

TEST_CASE("the matrix names every policy that ranks") {
  std::set<std::string_view> named;
  for (const auto& spec : ranking) {
    named.insert(policies::find_entry(spec.substr(0, spec.find(':')), true)->name);
  }
  for (const auto& e : policies::catalogue()) {
    if (e.kind == "policy" && e.composes) CHECK(named.count(e.name) == 1);
  }
}

TEST_CASE("properties of every policy on every kind of trace") {
  for (const auto kind : kinds) {
    CAPTURE(static_cast<int>(kind));
    const matrix_trace m(kind);
    for (const std::string budget : {"12", "1", "30%"}) check_all(m, all_ranking(budget, m.table));
  }
}

TEST_CASE("properties of a hundred random compositions") {
  const trace_kind on[] = {trace_kind::grouped, trace_kind::windowed, trace_kind::sinks,
                           trace_kind::one_token_prompt};
  for (size_t i = 0; i < std::size(on); ++i) {
    const matrix_trace m(on[i], 20 + i);
    check_all(m, random_specs(i, 25, m.table));
  }
}

TEST_CASE("every policy with a budget above the length is full, bit for bit") {
  for (const auto kind : kinds) {
    CAPTURE(static_cast<int>(kind));
    const matrix_trace m(kind, 5);
    auto specs = all_ranking("100000", m.table);
    for (auto& spec : specs) {
      if (const auto low = spec.find("low=20"); low != std::string::npos) {
        spec.replace(low, 6, "low=100000");
      }
      if (const auto int8 = spec.find("+int8"); int8 != std::string::npos) spec.resize(int8);
    }
    specs.insert(specs.begin(), "full");
    const auto lanes = replay_open(m.trace, 0, parse_all(specs), {});
    for (const auto& lane : lanes) {
      CAPTURE(lane.row.policy);
      REQUIRE_MESSAGE(lane.row.status == "ok", lane.row.note);
      CHECK(*lane.row.quality.output_rel_l2 == *lanes[0].row.quality.output_rel_l2);
      CHECK(*lane.row.quality.attention_recall == *lanes[0].row.quality.attention_recall);
      CHECK(*lane.row.memory.mean_bytes == *lanes[0].row.memory.mean_bytes);
      CHECK(*lane.row.events.evicted == 0);
    }
  }
}

reports::report as_report(const std::vector<lane_output>& lanes) {
  reports::report report;
  for (const auto& lane : lanes) report.runs.push_back(lane.row);
  return report;
}

TEST_CASE("every policy gives the same rows again, for any thread count and block size") {
  const matrix_trace m(trace_kind::windowed, 3);
  auto specs = all_ranking("9", m.table);
  for (const auto& more : random_specs(7, 20, m.table)) specs.push_back(more);
  const auto policies = parse_all(specs);
  const auto reference = as_report(replay_open(m.trace, 0, policies, {}));
  for (const int threads : {1, 3}) {
    const tbb::global_control limit(tbb::global_control::max_allowed_parallelism,
                                    static_cast<size_t>(threads));
    for (const std::int64_t block : {1, 128}) {
      open_loop_options options;
      options.block = block;
      const auto again = as_report(replay_open(m.trace, 0, policies, options));
      CHECK(reports::differences(reference, again).empty());
    }
  }
}

TEST_CASE("rows after t change no decision up to t, unless the future is declared") {
  const std::int64_t from = 70;
  const matrix_trace m(trace_kind::grouped, 21);
  copy_trace(m.trace, m.folder / "same.h5", {});
  copy_trace(m.trace, m.folder / "changed.h5", {.changed_from = from});
  const traces::reader same(m.folder / "same.h5"), changed(m.folder / "changed.h5");
  auto specs = all_ranking("9", m.table);
  for (const auto& more : random_specs(3, 30, m.table)) specs.push_back(more);
  const auto policies = parse_all(specs);
  open_loop_options options;
  options.kept = true;
  const auto before = replay_open(same, 0, policies, options);
  const auto after = replay_open(changed, 0, policies, options);
  size_t later = 0, leaks = 0;
  for (size_t i = 0; i < policies.size(); ++i) {
    CAPTURE(specs[i]);
    if (refused_by_budget(before[i])) continue;
    REQUIRE_MESSAGE(after[i].row.status == "ok", after[i].row.note);
    const auto a = kept_sets(m.trace, before[i]), b = kept_sets(changed, after[i]);
    bool early = false;
    for (const auto& [key, positions] : a) {
      const bool differs = b.at(key) != positions;
      if (std::get<0>(key) < from) {
        early = early || differs;
      } else {
        later += differs ? 1 : 0;
      }
    }
    if (policies[i].needs.future) {
      leaks += early ? 1 : 0;
    } else {
      CHECK_FALSE(early);
    }
  }
  CHECK(later > 0);
  CHECK(leaks > 0);  // the oracle does look ahead
}

TEST_CASE("the order of the heads is only a name") {
  const matrix_trace m(trace_kind::grouped, 9);
  copy_trace(m.trace, m.folder / "same.h5", {});
  copy_trace(m.trace, m.folder / "swapped.h5", {.wo = false, .swapped_heads = true});
  const traces::reader same(m.folder / "same.h5"), swapped(m.folder / "swapped.h5");
  auto policies = parse_all(all_ranking("9", m.table));
  std::erase_if(policies, [](const auto& p) {
    // Those that name heads, and ties over heads, which go to the lower one.
    return p.score.kind == policies::score_kind::hash ||
           p.score.scope == policies::score_scope::layer ||
           p.budget.division.kind != policies::division_kind::uniform;
  });
  open_loop_options options;
  options.kept = true;
  options.quality = false;
  const auto straight = replay_open(same, 0, policies, options);
  const auto reversed = replay_open(swapped, 0, policies, options);
  const int heads = m.trace.model().n_kv_heads;
  for (size_t i = 0; i < policies.size(); ++i) {
    CAPTURE(policies[i].spec);
    REQUIRE_MESSAGE(reversed[i].row.status == "ok", reversed[i].row.note);
    const auto a = kept_sets(same, straight[i]), b = kept_sets(swapped, reversed[i]);
    for (const auto& [key, positions] : a) {
      const auto [step, layer, head] = key;
      CHECK(b.at({step, layer, heads - 1 - head}) == positions);
    }
  }
}

TEST_CASE("a larger budget never lowers knorm's recall") {
  const matrix_trace m(trace_kind::grouped, 2);
  double last = 0;
  for (const int budget : {5, 6, 10, 30, 60, 95}) {
    const auto policy = policies::parse_policy(fmt::format("knorm:budget={}", budget));
    const double recall =
        *replay_open(m.trace, 0, {&policy, 1}, {})[0].row.quality.attention_recall;
    CHECK(recall >= last - 1e-9);
    last = recall;
  }
}

}  // namespace
}  // namespace kvreplay::replay
