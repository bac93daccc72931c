// survival, fit-retention and headscore: what they measure on traces where the answer is known.
#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "kernels/reference.hpp"
#include "replay/bind.hpp"
#include "replay/fit_retention.hpp"
#include "replay/head_scores.hpp"
#include "replay/layer_data.hpp"
#include "replay/one_hot_trace.hpp"
#include "replay/survival.hpp"
#include "replay/test_program.hpp"
#include "replay/test_support.hpp"
#include "traces/reader.hpp"
#include "traces/retention_gate.hpp"

namespace kvreplay::replay {
namespace {

TEST_CASE("a geometric decay is recovered, and both ends are survived") {
  for (const double beta : {0.5, 0.9, 0.999, 0.99999}) {
    std::vector<std::int32_t> age;
    std::vector<double> alive;
    std::vector<std::int64_t> seen;
    for (int i = 0; i < 12; ++i) {
      age.push_back(1 << i);
      alive.push_back(std::pow(beta, age.back()));
      seen.push_back(1000 - 10 * i);
    }
    CHECK(fit_geometric(age, alive, seen) == doctest::Approx(beta).epsilon(1e-6));
  }
  CHECK(fit_geometric({1, 2}, {1, 1}, {10, 10}) > 1 - 1e-9);
  CHECK(fit_geometric({1, 2}, {0, 0}, {10, 10}) < 1e-9);
}

TEST_CASE("last ages are those of a slow count, in windowed layers too") {
  temporary_folder folder;
  for (const auto kind : {trace_kind::grouped, trace_kind::windowed, trace_kind::sinks}) {
    traces::synth(folder / "t.h5", options_for(kind, 3));
    const traces::reader trace(folder / "t.h5");
    const auto& m = trace.model();
    const int layer = 1, group = m.group();
    const auto shape = cache_shape_for(m, {&layer, 1});
    const auto data = load_layer(trace, 0, layer);
    const int window = shape.window_of(0);
    for (const std::int64_t end : {std::int64_t{0}, std::int64_t{50}}) {
      const auto got = measure_last_ages(trace, 0, layer, end);
      for (int g = 0; g < m.n_kv_heads; ++g) {
        std::vector<std::int32_t> expected(static_cast<size_t>(data.n_tokens), -1);
        for (std::int64_t t = 0; t < (end > 0 ? end : data.n_tokens); ++t) {
          const std::int64_t first = window > 0 ? std::max<std::int64_t>(0, t + 1 - window) : 0;
          std::vector<double> mass(static_cast<size_t>(t + 1));
          for (int h = g * group; h < (g + 1) * group; ++h) {
            const float* q = data.q_at(t) + h * m.head_dim;
            std::vector<double> k, v;
            for (std::int64_t i = first; i <= t; ++i) {
              const float* key = data.k_at(i) + g * m.head_dim;
              k.insert(k.end(), key, key + m.head_dim);
              v.push_back(0);
            }
            const double sink =
                shape.sink_logits.empty() ? 0 : shape.sink_logits[static_cast<size_t>(h)];
            const auto row = kernels::reference_attend(std::vector<double>(q, q + m.head_dim), k, v,
                                                       1, m.softmax_scale,
                                                       shape.sink_logits.empty() ? nullptr : &sink);
            for (std::int64_t i = first; i <= t; ++i) {
              mass[static_cast<size_t>(i)] += row.mass[static_cast<size_t>(i - first)] / group;
            }
          }
          for (std::int64_t i = first; i <= t; ++i) {
            if (mass[static_cast<size_t>(i)] > 1 / static_cast<double>(t + 1 - first)) {
              expected[static_cast<size_t>(i)] = static_cast<std::int32_t>(t - i);
            }
          }
        }
        CHECK(got[static_cast<size_t>(g)] == expected);
      }
    }
  }
}

TEST_CASE("survival counts only entries that could be seen at an age") {
  temporary_folder folder;
  // Every row looks at position 0 alone; nothing else ever has more than its share but itself.
  one_hot_trace hot(1, 2, 9);
  for (int t = 0; t < 9; ++t) hot.look(t, 0, 0, 30);
  hot.write(folder / "t.h5");
  const traces::reader trace(folder / "t.h5");
  const auto curves = measure_survival(trace);
  REQUIRE(curves.size() == 1);
  CHECK(curves[0].age == std::vector<std::int32_t>{1, 2, 4, 8});
  CHECK(curves[0].seen == std::vector<std::int64_t>{8, 7, 5, 1});
  CHECK(curves[0].alive[0] == doctest::Approx(1.0 / 8));
  CHECK(curves[0].alive[3] == 1);
}

TEST_CASE("head scores are the needle's share of a row's top entries") {
  temporary_folder folder;
  one_hot_trace hot(2, 8, 12);
  hot.span("needle", 2, 4);
  for (int t = 8; t < 12; ++t) {
    // Head 0: position 2 (needle) and 5 on top, half each. Head 1 looks elsewhere, and a little at
    // the needle: too little to be among its top two.
    hot.look(t, 0, 2, 30);
    hot.look(t, 0, 5, 30);
    hot.look(t, 1, 6, 30);
    hot.look(t, 1, 7, 29);
    hot.look(t, 1, 3, 25);
  }
  hot.look(11, 1, 3, 40);  // the last row of head 1 finds it
  hot.write(folder / "t.h5");
  const auto table = measure_head_scores({folder / "t.h5"});
  CHECK(table.probes == 1);
  CHECK(table.rows == 4);
  REQUIRE(table.scores.size() == 1);
  // Head 0: 1/2 in every row; head 1: 1 in one row of four. Normalised to sum 1.
  CHECK(table.scores[0][0] == doctest::Approx(0.5 / 0.75).epsilon(1e-3));
  CHECK(table.scores[0][1] == doctest::Approx(0.25 / 0.75).epsilon(1e-3));
  const auto json = nlohmann::json::parse(head_scores_json(table));
  CHECK(json["schema"] == "kvreplay.headscores/1");
  CHECK(json["scores"][0][1] == table.scores[0][1]);
  one_hot_trace plain(1, 2, 4);
  plain.write(folder / "plain.h5");
  CHECK_THROWS_WITH_AS(measure_head_scores({folder / "plain.h5"}),
                       doctest::Contains("span `needle`"), traces::trace_error);
}

TEST_CASE("gates are stored with the trace, and are what the rows were computed with") {
  temporary_folder folder;
  auto options = options_for(trace_kind::grouped, 8);
  options.sequences = 3;
  traces::synth(folder / "t.h5", options);
  const traces::reader trace(folder / "t.h5");
  for (const auto projection :
       {gate_projection::shared, gate_projection::layer, gate_projection::head}) {
    fit_options fitting;
    fitting.projection = projection;
    fitting.hidden = 4;
    fitting.epochs = 3;
    const auto fit = fit_retention(trace, fitting);
    CHECK(fit.held_out == std::vector<int>{2});
    traces::copy_with_retention(folder / "t.h5", folder / "r.h5", fit.rows, fit.gate);
    const traces::reader copy(folder / "r.h5");
    const auto gate = traces::read_retention_gate(folder / "r.h5", copy.model());
    REQUIRE(gate.has_value());
    CHECK(gate->outputs == (projection == gate_projection::shared  ? 1
                            : projection == gate_projection::layer ? 3
                                                                   : 6));
    for (const int sequence : {0, 2}) {
      for (const int layer : {0, 2}) {
        const auto slice = copy.read_layer(sequence, layer, 0, 96);
        CHECK(slice.retention ==
              fit.rows[static_cast<size_t>(sequence)][static_cast<size_t>(layer)]);
        const auto data = load_layer(copy, sequence, layer);
        for (const std::int64_t t : {0, 95}) {
          const float again =
              traces::log_retention(*gate, layer, 1, data.k_at(t) + 8, data.v_at(t) + 8);
          CHECK(again == slice.retention[static_cast<size_t>(t * 2 + 1)]);
          CHECK(again <= 0);
        }
      }
    }
    // The same file can be fitted again: what it had is replaced.
    traces::copy_with_retention(folder / "r.h5", folder / "r.h5", fit.rows, fit.gate);
    CHECK(traces::read_retention_gate(folder / "r.h5", copy.model()).has_value());
  }
  CHECK(!traces::read_retention_gate(folder / "t.h5", trace.model()).has_value());
  // A gate that does not fit the model, or holds what is no number, is refused by name.
  auto other = trace.model();
  ++other.head_dim;
  CHECK_THROWS_WITH_AS(traces::read_retention_gate(folder / "r.h5", other),
                       doctest::Contains("shape ["), traces::trace_error);
  fit_options fitting;
  fitting.epochs = 1;
  auto fit = fit_retention(trace, fitting);
  fit.gate.hidden_bias[0] = NAN;
  traces::copy_with_retention(folder / "t.h5", folder / "nan.h5", fit.rows, fit.gate);
  CHECK_THROWS_WITH_AS(traces::read_retention_gate(folder / "nan.h5", trace.model()),
                       doctest::Contains("hidden_bias"), traces::trace_error);
}

TEST_CASE("fitting is the same for any thread count and other with another seed") {
  temporary_folder folder;
  const auto t = small_trace(folder, "--tokens 160 --prompt-length 60");
  const auto fit = [&](const std::string& more, const std::string& name) {
    const auto done =
        run(folder, "fit-retention " + t + " -o " + (folder / name) + " --epochs 4 " + more);
    REQUIRE_MESSAGE(done.code == 0, done.err);
    const traces::reader trace(folder / name);
    return trace.read_layer(0, 1, 0, 160).retention;
  };
  const auto one = fit("--threads 1", "a.h5");
  CHECK(one == fit("--threads 3", "b.h5"));
  CHECK(one != fit("--seed 4", "c.h5"));
  const auto refused =
      run(folder, "fit-retention " + small_trace(folder, "--tokens 20 --prompt-length 8") + " -o " +
                      (folder / "d.h5"));
  CHECK(refused.code == 1);
  CHECK(refused.err.find("entries to learn from") != std::string::npos);
  CHECK(!std::ifstream(folder / "d.h5").good());
}

// On a real model's trace: held-out entries are known better than by one decay a head, and ordered
// better than by their age.
TEST_CASE("gates learn what tells entries apart") {
  const traces::reader trace(std::string(KVREPLAY_SOURCE_DIR) + "/traces/samples/smollm2-1k.h5");
  const auto fit = fit_retention(trace, {});
  CHECK(fit.first_held == 750);
  CHECK(fit.held_out.empty());
  CHECK(fit.held_loss < 0.97 * fit.held_loss_constant);
  CHECK(fit.rank_correlation > fit.recency_correlation + 0.1);
}

}  // namespace
}  // namespace kvreplay::replay
