// residual_rel_l2, output_l1 and head_l1 against a plain double computation from the trace.
#include "replay/projection.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

#include "kernels/half.hpp"
#include "kernels/reference.hpp"
#include "policies/policy.hpp"
#include "replay/open_loop.hpp"
#include "replay/test_support.hpp"
#include "traces/reader.hpp"

namespace kvreplay::replay {
namespace {

constexpr int budget = 8;

struct expected_measures {
  double residual = 0, output_l1 = 0, head_l1 = 0;
};

std::vector<double> rows_of(const std::vector<traces::half_bits>& bits, std::int64_t begin,
                            std::int64_t end, int heads, int head, int dim) {
  std::vector<double> out;
  for (std::int64_t t = begin; t < end; ++t) {
    for (int c = 0; c < dim; ++c) {
      out.push_back(
          kernels::half_to_float(bits[static_cast<size_t>((t * heads + head) * dim + c)]));
    }
  }
  return out;
}

// One layer at one step of window:budget=8, which attends over the newest nine positions.
void add_step(const traces::model_info& m, const traces::layer_slice& slice,
              const std::vector<float>& wo, std::int64_t t, double& norm2, double& l1,
              double& reference_l1, double& head_l1) {
  const auto hidden = static_cast<size_t>(m.hidden_size), dim = static_cast<size_t>(m.value_dim);
  std::vector<double> error(hidden, 0.0), full(hidden, 0.0);
  for (int h = 0; h < m.n_q_heads; ++h) {
    const int g = h / m.group();
    const auto q = rows_of(slice.q, t, t + 1, m.n_q_heads, h, m.head_dim);
    const auto k = rows_of(slice.k, t - budget, t + 1, m.n_kv_heads, g, m.head_dim);
    const auto v = rows_of(slice.v, t - budget, t + 1, m.n_kv_heads, g, m.value_dim);
    const auto cut = kernels::reference_attend(q, k, v, m.value_dim, m.softmax_scale, nullptr);
    std::vector<double> one(hidden, 0.0);
    for (size_t c = 0; c < dim; ++c) {
      const double o = slice.o[(static_cast<size_t>(t) * static_cast<size_t>(m.n_q_heads) +
                                static_cast<size_t>(h)) *
                                   dim +
                               c];
      for (size_t j = 0; j < hidden; ++j) {
        const double w = wo[(static_cast<size_t>(h) * dim + c) * hidden + j];
        one[j] += (cut.o[c] - o) * w;
        full[j] += o * w;
      }
    }
    for (size_t j = 0; j < hidden; ++j) {
      head_l1 += std::fabs(one[j]);
      error[j] += one[j];
    }
  }
  for (size_t j = 0; j < hidden; ++j) {
    norm2 += error[j] * error[j];
    l1 += std::fabs(error[j]);
    reference_l1 += std::fabs(full[j]);
  }
}

expected_measures measure(const traces::reader& trace) {
  const auto& m = trace.model();
  const auto& info = trace.sequence(0);
  std::vector<double> residual2(static_cast<size_t>(info.n_decode()), 0.0);
  expected_measures out;
  for (const int layer : m.layers) {
    const auto slice = trace.read_layer(0, layer, 0, info.n_tokens);
    const auto wo = trace.wo(layer);
    for (std::int64_t t = info.n_prompt; t < info.n_tokens; ++t) {
      double norm2 = 0, l1 = 0, reference_l1 = 0;
      add_step(m, slice, wo, t, norm2, l1, reference_l1, out.head_l1);
      const double x = slice.residual_norm[static_cast<size_t>(t)];
      residual2[static_cast<size_t>(t - info.n_prompt)] += norm2 / (x * x);
      out.output_l1 += l1 / reference_l1;
    }
  }
  const auto steps = static_cast<double>(info.n_decode());
  for (const double r : residual2) out.residual += std::sqrt(r) / steps;
  out.output_l1 /= steps * static_cast<double>(m.layers.size());
  out.head_l1 /= steps * static_cast<double>(m.layers.size()) * m.n_q_heads;
  return out;
}

TEST_CASE("errors carried through the output projection") {
  temporary_folder folder;
  auto options = options_for(trace_kind::grouped, 12);
  options.wo = options.residual = true;
  traces::synth(folder / "t.h5", options);
  const traces::reader trace(folder / "t.h5");
  const auto expected = measure(trace);
  const auto policy = policies::parse_policy("window:budget=8");
  const auto row = replay_open(trace, 0, {&policy, 1}, {})[0].row;
  REQUIRE_MESSAGE(row.status == "ok", row.note);
  CHECK(expected.residual > 0);
  CHECK(*row.quality.residual_rel_l2 == doctest::Approx(expected.residual).epsilon(1e-4));
  CHECK(*row.quality.output_l1 == doctest::Approx(expected.output_l1).epsilon(1e-4));
  CHECK(*row.quality.head_l1 == doctest::Approx(expected.head_l1).epsilon(1e-4));
}

}  // namespace
}  // namespace kvreplay::replay
