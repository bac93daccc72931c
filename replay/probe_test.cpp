// The probe against a forward pass of its own for single steps, with attention written out.
#include "replay/probe.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

#include "replay/test_support.hpp"
#include "tracer/record.hpp"
#include "traces/reader.hpp"
#include "traces/writer.hpp"

namespace kvreplay::replay {
namespace {

std::vector<double> probabilities(const std::vector<float>& logits) {
  double sum = 0;
  for (const float x : logits) sum += std::exp(double{x});
  std::vector<double> out;
  for (const float x : logits) out.push_back(std::exp(double{x}) / sum);
  return out;
}

// Row t over the positions that `visible` allows; past rows come from whole rows run before.
class plain_model {
 public:
  explicit plain_model(const tracer::model& m, const std::vector<std::int32_t>& tokens)
      : model_(m), tokens_(tokens), k_(static_cast<size_t>(m.config().n_layers)), v_(k_.size()) {
    for (std::int64_t t = 0; t < std::ssize(tokens); ++t) run(t, t, true);
  }

  // Sees 0 .. end-1 and t itself.
  std::vector<double> run(std::int64_t t, std::int64_t end, bool keep = false) {
    const auto& c = model_.config();
    const std::vector<std::int32_t> token = {tokens_[static_cast<size_t>(t)]};
    const std::vector<std::int64_t> position = {t};
    const auto attend = [&](tracer::attention_block& b) {
      auto& k = k_[static_cast<size_t>(b.layer)];
      auto& v = v_[static_cast<size_t>(b.layer)];
      const auto width = static_cast<size_t>(c.n_kv_heads * c.head_dim);
      auto keys = std::vector<float>(k.begin(), k.begin() + end * static_cast<std::int64_t>(width));
      auto values =
          std::vector<float>(v.begin(), v.begin() + end * static_cast<std::int64_t>(width));
      keys.insert(keys.end(), b.k.begin(), b.k.end());
      values.insert(values.end(), b.v.begin(), b.v.end());
      attend_plainly(b, keys, values, static_cast<size_t>(end) + 1);
      if (keep) {
        k.insert(k.end(), b.k.begin(), b.k.end());
        v.insert(v.end(), b.v.begin(), b.v.end());
      }
    };
    const auto residual = model_.forward(token, position, attend);
    std::vector<float> logits;
    model_.logits(residual, 1, logits);
    return probabilities(logits);
  }

 private:
  void attend_plainly(tracer::attention_block& b, const std::vector<float>& keys,
                      const std::vector<float>& values, size_t n) const {
    const auto& c = model_.config();
    const auto dim = static_cast<size_t>(c.head_dim);
    const auto kv = static_cast<size_t>(c.n_kv_heads);
    for (size_t h = 0; h < static_cast<size_t>(c.n_q_heads); ++h) {
      const size_t g = h * kv / static_cast<size_t>(c.n_q_heads);
      std::vector<double> o(dim);
      double sum = 0;
      for (size_t i = 0; i < n; ++i) {
        double s = 0;
        for (size_t d = 0; d < dim; ++d) {
          s += double{b.q[h * dim + d]} * keys[(i * kv + g) * dim + d];
        }
        const double e = std::exp(s * c.softmax_scale);
        sum += e;
        for (size_t d = 0; d < dim; ++d) o[d] += e * values[(i * kv + g) * dim + d];
      }
      for (size_t d = 0; d < dim; ++d) b.o[h * dim + d] = static_cast<float>(o[d] / sum);
    }
  }

  const tracer::model& model_;
  const std::vector<std::int32_t>& tokens_;
  std::vector<std::vector<float>> k_, v_;  // [layers]
};

TEST_CASE("hiding positions from one step, against the same written out") {
  temporary_folder folder;
  const auto model = tracer::model::load(std::string(KVREPLAY_SOURCE_DIR) +
                                         "/tracer/testdata/models/llama3_scaled");
  tracer::record_options options;
  for (int i = 0; i < 60; ++i) options.tokens.push_back((i * i % 23 + i / 7 * 5) % 61);
  options.prompt_length = 12;
  const auto path = folder / "t.h5";
  tracer::record(model, path, options, {});
  const traces::reader trace(path);
  const std::vector<int> hidden{4, 20};
  const auto series = probe_confidence(trace, 0, model, hidden, 16, {});
  CHECK(series[0].points.size() == 48);
  CHECK(series[1].points.size() == 39);  // before step 21 nothing would be left to see
  CHECK(series[1].points.front().position == 21);
  plain_model plain(model, options.tokens);
  for (const auto& s : series) {
    for (const size_t i : {size_t{0}, size_t{17}, s.points.size() - 1}) {
      const auto& point = s.points[i];
      const auto p = plain.run(point.position, point.position);
      const auto q = plain.run(point.position, point.position - s.hidden);
      double kl = 0;
      for (size_t v = 0; v < p.size(); ++v) kl += p[v] * std::log(p[v] / q[v]);
      // The probe rounds keys and values to 16 bits, the plain pass does not.
      CHECK(point.kl == doctest::Approx(kl).epsilon(0.02));
      CHECK(kl > 1e-4);
    }
  }
}

TEST_CASE("correlations of a series by hand") {
  probe_series s;
  for (int i = 0; i < 200; ++i) {
    s.points.push_back({i, i / 200.0, (200 - i) * 0.01 + (i % 7 == 0 ? 0.3 : 0.0)});
  }
  correlate(s);
  CHECK(*s.pearson < -0.9);
  CHECK(*s.pearson_ci.first <= *s.pearson);
  CHECK(*s.pearson_ci.second >= *s.pearson);
  for (auto& p : s.points) p.kl = 1;
  s.pearson.reset();
  correlate(s);
  CHECK_FALSE(s.pearson);  // a constant column correlates with nothing
}

}  // namespace
}  // namespace kvreplay::replay
