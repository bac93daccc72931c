#include "traces/synth.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "traces/check.hpp"
#include "traces/synth_model.hpp"
#include "traces/test_support.hpp"

namespace kvreplay::traces {

using namespace testing;

namespace {

void expect_clean(const std::string& name, const synth_options& options) {
  const temp_folder folder;
  synth(folder / "s.h5", options);
  const check_report report = check(reader(folder / "s.h5"), {.all = true});
  INFO(name);
  for (const check_finding& finding : report.findings) MESSAGE(finding.text);
  CHECK(report.ok());
  CHECK(report.max_lse_error < 1e-5);
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), {});
  // The one thing that may differ between two runs.
  const reader trace(path);
  for (size_t at; (at = bytes.find(trace.created())) != std::string::npos;) {
    bytes.replace(at, trace.created().size(), trace.created().size(), '-');
  }
  return bytes;
}

// Shares of the probability of row t, head h of layer 0.
std::vector<double> probabilities(const reader& file, std::int64_t t, std::int64_t h) {
  const model_info& m = file.model();
  const layer_slice s = file.read_layer(0, 0, 0, t + 1);
  std::vector<double> p;
  for (std::int64_t i = 0; i <= t; ++i) {
    double score = 0;
    for (std::int64_t c = 0; c < m.head_dim; ++c) {
      score += static_cast<double>(half_to_float(
                   s.q[static_cast<size_t>((t * m.n_q_heads + h) * m.head_dim + c)])) *
               static_cast<double>(half_to_float(
                   s.k[static_cast<size_t>((i * m.n_kv_heads + h / m.group()) * m.head_dim + c)]));
    }
    p.push_back(std::exp(score * m.softmax_scale -
                         static_cast<double>(s.lse[static_cast<size_t>(t * m.n_q_heads + h)])));
  }
  return p;
}

double mean_mass(const synth_options& options,
                 const std::function<bool(std::int64_t, std::int64_t)>& of) {
  const temp_folder folder;
  synth(folder / "s.h5", options);
  const reader file(folder / "s.h5");
  double sum = 0;
  int rows = 0;
  for (std::int64_t t = options.prompt_length; t < options.tokens; t += 8) {
    for (int h = 0; h < options.q_heads; ++h, ++rows) {
      const std::vector<double> p = probabilities(file, t, h);
      for (size_t i = 0; i < p.size(); ++i) {
        if (of(static_cast<std::int64_t>(i), t)) sum += p[i];
      }
    }
  }
  return sum / rows;
}

}  // namespace

TEST_CASE("portable exp and log agree with the C library's to the last digits") {
  for (double x = -690; x < 690; x += 0.37) {
    CHECK(portable_exp(x) == doctest::Approx(std::exp(x)).epsilon(1e-13));
    CHECK(portable_log(std::exp(x)) == doctest::Approx(x).epsilon(1e-13));
  }
  CHECK(portable_exp(0) == 1);
  CHECK(portable_exp(-1e9) == 0);
}

TEST_CASE("uniforms and normals have the moments they should") {
  double sum = 0, square = 0, uniform = 0;
  const int n = 20000;
  for (std::uint64_t i = 0; i < n; ++i) {
    const double x = synth_normal(5, 9, i);
    sum += x;
    square += x * x;
    uniform += synth_uniform(5, 9, i);
  }
  CHECK(std::fabs(sum / n) < 0.03);
  CHECK(std::fabs(square / n - 1) < 0.05);
  CHECK(std::fabs(uniform / n - 0.5) < 0.01);
  CHECK(synth_uniform(5, 9, 3) != synth_uniform(6, 9, 3));
  CHECK(synth_uniform(5, 9, 3) != synth_uniform(5, 10, 3));
}

TEST_CASE("the same options give the same file; another seed another") {
  const temp_folder folder;
  synth_options o;
  o.layers = 2;
  o.value_norm = o.retention = o.residual = o.attention = o.learned_sinks = true;
  o.tokens = 120;
  o.sequences = 2;
  synth(folder / "a.h5", o);
  synth(folder / "b.h5", o);
  CHECK(bytes_of(folder / "a.h5") == bytes_of(folder / "b.h5"));
  o.seed = 1;
  synth(folder / "c.h5", o);
  const reader a(folder / "a.h5"), c(folder / "c.h5");
  CHECK(a.fingerprint(0) != c.fingerprint(0));
  CHECK(a.fingerprint(0) != a.fingerprint(1));
  // Pinned: the same on every machine.
  CHECK(a.fingerprint(0) == "9641a6e66c4eb499");
}

TEST_CASE("every option gives a trace that passes check --all") {
  synth_options base;
  base.layers = 2;
  base.prompt_length = 30;
  base.tokens = 70;
  expect_clean("defaults", synth_options{});
  const auto with = [&](const char* name, const std::function<void(synth_options&)>& change) {
    synth_options o = base;
    change(o);
    expect_clean(name, o);
  };
  with("group of 7",
       [](auto& o) { o.q_heads = 14, o.kv_heads = 2, o.head_dim = 10, o.value_dim = 6; });
  with("windows", [](auto& o) { o.window = {0, 16}; });
  with("windows and attention", [](auto& o) { o.window = {5, 1}, o.attention = true; });
  with("sinks", [](auto& o) { o.learned_sinks = o.attention = true; });
  with("extras", [](auto& o) { o.value_norm = o.retention = o.residual = o.attention = true; });
  with("no logits", [](auto& o) { o.logits = false; });
  with("sequences", [](auto& o) { o.sequences = 3; });
  with("prompt only", [](auto& o) { o.prompt_length = o.tokens = 20; });
  with("one token", [](auto& o) { o.prompt_length = o.tokens = 1; });
  with("a vocabulary of one", [](auto& o) { o.vocab_size = o.logit_size = 1; });
  with("flat", [](auto& o) { o.sink = o.heavy = o.drift = o.locality = o.heavy_share = 0; });
  for (const int dim : {1, 2, 3, 4, 12}) with("small heads", [=](auto& o) { o.head_dim = dim; });
  synth_options bad;
  bad.kv_heads = 4;
  const temp_folder folder;
  CHECK(error_of([&] { synth(folder / "x.h5", bad); }).find("no multiple") != std::string::npos);
  bad = {};
  bad.window = {1};
  CHECK(error_of([&] { synth(folder / "x.h5", bad); }).find("1 windows") != std::string::npos);
}

TEST_CASE("the structure is there: sink, heavy hitters, locality") {
  synth_options o;
  o.layers = 1;
  const auto sink = [](std::int64_t i, std::int64_t) { return i == 0; };
  synth_options none = o;
  none.sink = 0;
  CHECK(mean_mass(o, sink) > 3 * mean_mass(none, sink));

  const std::vector<bool> heavy = synth_heavy(o.seed, o);
  const auto on_heavy = [&](std::int64_t i, std::int64_t) { return heavy[static_cast<size_t>(i)]; };
  none = o;
  none.heavy = 0;
  CHECK(mean_mass(o, on_heavy) > 1.5 * mean_mass(none, on_heavy));

  const auto recent = [](std::int64_t i, std::int64_t t) { return t - i < 24; };
  synth_options local = o;
  local.locality = 0.1;
  none = o;
  none.locality = none.drift = 0;
  CHECK(mean_mass(local, recent) > 2 * mean_mass(none, recent));
}

TEST_CASE("confidences spread, so that a gate has something to do") {
  const temp_folder folder;
  synth(folder / "s.h5", synth_options{});
  const reader file(folder / "s.h5");
  CHECK(file.model().cache_dtype == "float16");
  CHECK(file.sequence(0).source == "synthetic");
  const std::vector<float> columns = file.confidence(0);
  std::vector<double> c;
  for (size_t i = 0; i < columns.size(); i += 4) {
    const auto at = [&](size_t k) { return static_cast<double>(columns[i + k]); };
    c.push_back(0.4 * (1 - at(0) / std::log(50.0)) + 0.3 / (1 + std::exp(-at(1))) + 0.3 * at(2));
  }
  const auto below = [&](double tau) {
    return static_cast<double>(
               std::count_if(c.begin(), c.end(), [&](double x) { return x < tau; })) /
           static_cast<double>(c.size());
  };
  CHECK(below(0.3) < 0.2);
  CHECK(below(0.5) > 0.15);
  CHECK(below(0.7) < 0.85);
  CHECK(below(0.9) > 0.6);
  CHECK(below(0.9) < 1.0);
}

}  // namespace kvreplay::traces
