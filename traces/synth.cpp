#include "traces/synth.hpp"

#include <fmt/format.h>
#include <tbb/parallel_for.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "traces/float16.hpp"
#include "traces/layout.hpp"
#include "traces/synth_model.hpp"
#include "traces/writer.hpp"

namespace kvreplay::traces {

namespace {

// Random streams of one sequence that belong to no layer; those of a layer start at 10.
enum stream : std::uint64_t { token_stream = 3, repeat_stream, logit_stream, residual_stream };
constexpr std::uint64_t weight_seed = 0x776f, sink_seed = 0x736b;  // of the model, not a sequence

std::vector<half_bits> to_halves(const std::vector<double>& values) {
  std::vector<half_bits> halves(values.size());
  std::transform(values.begin(), values.end(), halves.begin(),
                 [](double x) { return float_to_half(static_cast<float>(x)); });
  return halves;
}

// L1 norm of each value through each query head's slice of wo [n_q_heads, value_dim, hidden_size].
std::vector<float> value_norms(const model_info& m, std::int64_t tokens,
                               const std::vector<half_bits>& v, const std::vector<double>& wo) {
  std::vector<float> norms(static_cast<size_t>(tokens * m.n_q_heads));
  const std::int64_t dv = m.value_dim, hidden = m.hidden_size;
  tbb::parallel_for(std::int64_t{0}, tokens, [&](std::int64_t t) {
    std::vector<double> projected(static_cast<size_t>(hidden));
    for (std::int64_t h = 0; h < m.n_q_heads; ++h) {
      std::fill(projected.begin(), projected.end(), 0.0);
      for (std::int64_t c = 0; c < dv; ++c) {
        const auto value = static_cast<double>(half_to_float(
            v[static_cast<size_t>(row_offset(t, m.n_kv_heads, h / m.group(), dv, c))]));
        const double* weights = &wo[static_cast<size_t>(row_offset(h, dv, c, hidden))];
        for (std::int64_t j = 0; j < hidden; ++j) {
          projected[static_cast<size_t>(j)] += value * weights[j];
        }
      }
      double norm = 0;
      for (const double x : projected) norm += std::fabs(x);
      norms[static_cast<size_t>(t * m.n_q_heads + h)] = static_cast<float>(norm);
    }
  });
  return norms;
}

synth_options resolve(synth_options o) {
  const auto need = [](bool good, const std::string& what) {
    if (!good) throw trace_error("synth: " + what);
  };
  need(o.layers >= 1 && o.q_heads >= 1 && o.kv_heads >= 1 && o.head_dim >= 1 && o.value_dim >= 0,
       "layers, heads and head_dim must be at least 1");
  need(o.q_heads % o.kv_heads == 0,
       fmt::format("{} query heads are no multiple of {} KV heads", o.q_heads, o.kv_heads));
  need(o.prompt_length >= 1 && o.prompt_length <= o.tokens,
       fmt::format("prompt of {} tokens, expected 1 to {}", o.prompt_length, o.tokens));
  need(o.sequences >= 1, "sequences must be at least 1");
  need(o.vocab_size >= 1 && o.logit_size >= o.vocab_size,
       fmt::format("logit_size {} is below vocab_size {}", o.logit_size, o.vocab_size));
  need(o.window.empty() || static_cast<int>(o.window.size()) == o.layers,
       fmt::format("{} windows for {} layers", o.window.size(), o.layers));
  if (o.value_dim == 0) o.value_dim = o.head_dim;
  if (o.hidden_size == 0) o.hidden_size = o.q_heads * o.head_dim;
  if (o.value_norm) o.wo = true;
  return o;
}

model_info make_model(const synth_options& o) {
  model_info m;
  m.name = "synthetic";
  m.architecture = "synthetic";
  m.n_layers = o.layers;
  m.n_q_heads = o.q_heads;
  m.n_kv_heads = o.kv_heads;
  m.head_dim = o.head_dim;
  m.value_dim = o.value_dim;
  m.hidden_size = o.hidden_size;
  m.vocab_size = o.vocab_size;
  m.logit_size = o.logit_size;
  m.softmax_scale = 1 / std::sqrt(static_cast<double>(o.head_dim));
  m.compute_dtype = "float64";
  m.cache_dtype = "float16";
  m.window = o.window;
  for (int i = 0; o.learned_sinks && i < o.layers * o.q_heads; ++i) {
    const double u = synth_uniform(o.seed, sink_seed, static_cast<std::uint64_t>(i));
    m.sinks.push_back(static_cast<float>(-1 + 3 * u));
  }
  return m;
}

// Attention of one query row in double from the 16-bit q, k, v.
struct attention {
  const model_info& model;
  const std::vector<double>&k, &v;  // one KV head: [T, head_dim], [T, value_dim]

  // p: [t + 1]; o: [value_dim]. Returns the log-sum-exp, the learned sink included.
  double row(const double* q, std::int64_t t, int layer, int head, std::vector<double>& p,
             double* o) const {
    const std::int64_t d = model.head_dim, dv = model.value_dim;
    const std::int64_t window = model.window.empty() ? 0 : model.window[static_cast<size_t>(layer)];
    const std::int64_t first = window > 0 ? std::max<std::int64_t>(0, t - window + 1) : 0;
    p.assign(static_cast<size_t>(t + 1), 0);
    const bool sink = !model.sinks.empty();
    const double sink_logit =
        sink ? static_cast<double>(model.sinks[static_cast<size_t>(layer * model.n_q_heads + head)])
             : -std::numeric_limits<double>::infinity();
    double top = sink_logit;
    for (std::int64_t i = first; i <= t; ++i) {
      double score = 0;
      for (std::int64_t c = 0; c < d; ++c) score += q[c] * k[static_cast<size_t>(i * d + c)];
      p[static_cast<size_t>(i)] = score * model.softmax_scale;
      top = std::max(top, p[static_cast<size_t>(i)]);
    }
    double sum = sink ? portable_exp(sink_logit - top) : 0;
    for (std::int64_t i = first; i <= t; ++i) {
      double& weight = p[static_cast<size_t>(i)];
      weight = portable_exp(weight - top);
      sum += weight;
    }
    for (std::int64_t i = first; i <= t; ++i) {
      double& weight = p[static_cast<size_t>(i)];
      weight /= sum;
      for (std::int64_t c = 0; c < dv; ++c) o[c] += weight * v[static_cast<size_t>(i * dv + c)];
    }
    return top + portable_log(sum);
  }
};

class sequence_maker {
 public:
  sequence_maker(writer& out, const synth_options& options, const model_info& model, int number)
      : out_(out), o_(options), model_(model) {
    seed_ = o_.seed + static_cast<std::uint64_t>(number) * 0x9e3779b97f4a7c15u;
    peakedness_ = synth_peakedness(seed_, o_.tokens);
    heavy_ = synth_heavy(seed_, o_);
    make_plan(number);
  }

  void write(const std::vector<std::vector<double>>& wo) {
    out_.begin_sequence(plan_);
    write_tokens();
    write_logits();
    if (o_.residual) write_residual_final();
    for (int layer = 0; layer < o_.layers; ++layer) {
      write_layer(layer, wo.empty() ? std::vector<double>() : wo[static_cast<size_t>(layer)]);
    }
    out_.end_sequence();
  }

 private:
  void make_plan(int number) {
    plan_.n_prompt = o_.prompt_length;
    plan_.n_tokens = o_.tokens;
    plan_.name = fmt::format("synthetic-{}", number);
    plan_.source = "synthetic";
    plan_.seed = static_cast<std::int64_t>(o_.seed & 0x7fffffffffffffffu);
    plan_.confidence = true;
    plan_.logits = o_.logits;
    plan_.residual_final = plan_.residual_norm = o_.residual;
    plan_.value_norm = o_.value_norm;
    plan_.retention = o_.retention;
    for (std::int64_t t = o_.prompt_length - 1; t < o_.tokens; ++t) {
      plan_.logit_pos.push_back(static_cast<std::int32_t>(t));
      if (o_.attention && t >= o_.prompt_length) {
        plan_.attn_pos.push_back(static_cast<std::int32_t>(t));
      }
    }
  }

  double uniform(std::uint64_t stream, std::int64_t index) const {
    return synth_uniform(seed_, stream, static_cast<std::uint64_t>(index));
  }
  double normal(std::uint64_t stream, std::int64_t index) const {
    return synth_normal(seed_, stream, static_cast<std::uint64_t>(index));
  }

  // A third of the tokens repeat one of the last twenty, as text does.
  void write_tokens() {
    for (std::int64_t t = 0; t < o_.tokens; ++t) {
      const double u = uniform(token_stream, t),
                   back = 1 + std::floor(20 * uniform(repeat_stream, t));
      const auto from = t - static_cast<std::int64_t>(back);
      const bool repeats = u < 1.0 / 3 && from >= 0;
      tokens_.push_back(repeats ? tokens_[static_cast<size_t>(from)]
                                : static_cast<std::int32_t>(std::floor(u * o_.vocab_size)));
    }
    out_.put_tokens(0, tokens_);
  }

  // Flat where peakedness is low, sharp where it is high, and in favour of the token that follows.
  std::vector<float> logit_row(std::int64_t t) const {
    const double z = peakedness_[static_cast<size_t>(t)], spread = 0.8 + 4.2 * z;
    std::vector<float> row;
    for (std::int64_t i = 0; i < o_.logit_size; ++i) {
      row.push_back(static_cast<float>(spread * normal(logit_stream, t * o_.logit_size + i)));
    }
    if (t + 1 < o_.tokens) {
      row[static_cast<size_t>(tokens_[static_cast<size_t>(t + 1)])] +=
          static_cast<float>(2 + 3 * spread * z);
    }
    return row;
  }

  // FORMAT.md's four columns over the real ids, in double.
  std::array<float, 4> confidence_of(const std::vector<float>& row) const {
    double first = -std::numeric_limits<double>::infinity(), second = first;
    for (int i = 0; i < o_.vocab_size; ++i) {
      const auto x = static_cast<double>(row[static_cast<size_t>(i)]);
      if (x > first) {
        second = first;
        first = x;
      } else {
        second = std::max(second, x);
      }
    }
    double sum = 0, weighted = 0;
    for (int i = 0; i < o_.vocab_size; ++i) {
      const double below = static_cast<double>(row[static_cast<size_t>(i)]) - first;
      const double weight = portable_exp(below);
      sum += weight;
      weighted += weight * below;
    }
    const double log_sum = portable_log(sum);
    return {static_cast<float>(std::max(log_sum - weighted / sum, 0.0)),
            static_cast<float>(first - second), static_cast<float>(1 / sum),
            static_cast<float>(first + log_sum)};
  }

  void write_logits() {
    for (size_t r = 0; r < plan_.logit_pos.size(); ++r) {
      const std::vector<float> row = logit_row(plan_.logit_pos[r]);
      const auto at = static_cast<std::int64_t>(r);
      out_.put_confidence(at, confidence_of(row));
      if (o_.logits) out_.put_logits(at, row);
    }
  }

  void write_residual_final() {
    std::vector<float> row(static_cast<size_t>(o_.hidden_size));
    for (size_t r = 0; r < plan_.logit_pos.size(); ++r) {
      for (std::int64_t i = 0; i < o_.hidden_size; ++i) {
        row[static_cast<size_t>(i)] = static_cast<float>(
            3 * normal(residual_stream, plan_.logit_pos[r] * std::int64_t{o_.hidden_size} + i));
      }
      out_.put_residual_final(static_cast<std::int64_t>(r), row);
    }
  }

  void write_layer(int layer, const std::vector<double>& wo);
  void write_attention(int layer);
  void write_extras(int layer, const std::vector<double>& wo);
  void attend(int layer, int kv_head, const synth_head& head);

  writer& out_;
  const synth_options& o_;
  const model_info& model_;
  std::uint64_t seed_ = 0;
  sequence_plan plan_;
  std::vector<double> peakedness_;
  std::vector<bool> heavy_;
  std::vector<std::int32_t> tokens_;
  // One layer, as written: [T, heads, dim].
  std::vector<half_bits> q_, k_, v_;
  std::vector<float> o_rows_, lse_;
  std::vector<half_bits> attn_;  // [attn_pos, n_q_heads, T]
};

void sequence_maker::attend(int layer, int kv_head, const synth_head& head) {
  const int group = model_.group();
  const std::int64_t d = o_.head_dim, dv = o_.value_dim, hq = o_.q_heads;
  tbb::parallel_for(std::int64_t{0}, o_.tokens, [&](std::int64_t t) {
    const attention one{model_, head.k, head.v};
    std::vector<double> p, o(static_cast<size_t>(dv));
    for (int g = 0; g < group; ++g) {
      const int h = kv_head * group + g;
      std::fill(o.begin(), o.end(), 0.0);
      const double lse = one.row(&head.q[static_cast<size_t>(row_offset(t, group, g, d))], t, layer,
                                 h, p, o.data());
      lse_[static_cast<size_t>(t * hq + h)] = static_cast<float>(lse);
      for (std::int64_t c = 0; c < dv; ++c) {
        o_rows_[static_cast<size_t>(row_offset(t, hq, h, dv, c))] =
            static_cast<float>(o[static_cast<size_t>(c)]);
      }
      if (plan_.attn_pos.empty() || t < o_.prompt_length) continue;
      const std::int64_t row = t - o_.prompt_length;
      for (size_t i = 0; i < p.size(); ++i) {
        attn_[static_cast<size_t>(row_offset(row, hq, h, o_.tokens)) + i] =
            float_to_half(static_cast<float>(p[i]));
      }
    }
  });
}

void sequence_maker::write_layer(int layer, const std::vector<double>& wo) {
  const int group = model_.group();
  const auto d = static_cast<size_t>(o_.head_dim), dv = static_cast<size_t>(o_.value_dim);
  const auto tokens = static_cast<size_t>(o_.tokens), hq = static_cast<size_t>(o_.q_heads),
             hkv = static_cast<size_t>(o_.kv_heads);
  q_.assign(tokens * hq * d, 0);
  k_.assign(tokens * hkv * d, 0);
  v_.assign(tokens * hkv * dv, 0);
  o_rows_.assign(tokens * hq * dv, 0);
  lse_.assign(tokens * hq, 0);
  attn_.assign(plan_.attn_pos.size() * hq * tokens, 0);
  for (int kv = 0; kv < o_.kv_heads; ++kv) {
    synth_head head = make_synth_head(seed_, layer, kv, o_, peakedness_, heavy_);
    const auto at = static_cast<size_t>(kv);
    // Copies one head's rows of `width` values into the interleaved layout and rounds the head.
    const auto place = [&](std::vector<double>& from, std::vector<half_bits>& to, size_t width,
                           size_t heads) {
      const std::vector<half_bits> halves = to_halves(from);
      for (size_t t = 0; t < tokens; ++t) {
        std::copy_n(halves.begin() + static_cast<std::ptrdiff_t>(t * width), width,
                    to.begin() + static_cast<std::ptrdiff_t>((t * heads + at) * width));
      }
      std::transform(halves.begin(), halves.end(), from.begin(),
                     [](half_bits bits) { return static_cast<double>(half_to_float(bits)); });
    };
    place(head.k, k_, d, hkv);
    place(head.v, v_, dv, hkv);
    place(head.q, q_, d * static_cast<size_t>(group), hkv);
    attend(layer, kv, head);
  }
  out_.put_q(layer, 0, q_);
  out_.put_k(layer, 0, k_);
  out_.put_v(layer, 0, v_);
  out_.put_o(layer, 0, o_rows_);
  out_.put_lse(layer, 0, lse_);
  write_attention(layer);
  write_extras(layer, wo);
}

void sequence_maker::write_attention(int layer) {
  const size_t width = static_cast<size_t>(o_.q_heads) * static_cast<size_t>(o_.tokens);
  for (size_t row = 0; row < plan_.attn_pos.size(); ++row) {
    out_.put_attention(layer, static_cast<std::int64_t>(row),
                       std::span(attn_).subspan(row * width, width));
  }
}

void sequence_maker::write_extras(int layer, const std::vector<double>& wo) {
  const std::uint64_t base = (std::uint64_t{1} << 40) + static_cast<std::uint64_t>(layer) * 8;
  if (o_.value_norm) {
    out_.put_value_norm(layer, 0, value_norms(model_, o_.tokens, v_, wo));
  }
  if (o_.residual) {
    std::vector<float> norms;
    for (std::int64_t t = 0; t < o_.tokens; ++t) {
      norms.push_back(static_cast<float>((5 + 2 * layer) * (0.8 + 0.4 * uniform(base, t))));
    }
    out_.put_residual_norm(layer, 0, norms);
  }
  if (o_.retention) {
    std::vector<float> logs;
    for (std::int64_t i = 0; i < o_.tokens * o_.kv_heads; ++i) {
      const std::int64_t t = i / o_.kv_heads;
      const double u = uniform(base + 1, i);
      const bool stays = t == 0 || heavy_[static_cast<size_t>(t)];
      logs.push_back(static_cast<float>(stays ? -1e-4 * (1 + u) : -0.002 - 0.1 * u * u));
    }
    out_.put_retention(layer, 0, logs);
  }
}

// [layers][n_q_heads, value_dim, hidden_size], already rounded to what the file holds.
std::vector<std::vector<double>> make_wo(writer& out, const synth_options& o) {
  std::vector<std::vector<double>> all;
  const std::int64_t size = row_offset(o.q_heads, o.value_dim, 0, o.hidden_size);
  const double scale = 1 / std::sqrt(static_cast<double>(o.q_heads) * o.value_dim);
  for (int layer = 0; o.wo && layer < o.layers; ++layer) {
    std::vector<float> weights;
    for (std::int64_t i = 0; i < size; ++i) {
      const double x = synth_normal(o.seed, weight_seed + (static_cast<std::uint64_t>(layer) << 32),
                                    static_cast<std::uint64_t>(i));
      weights.push_back(half_to_float(float_to_half(static_cast<float>(scale * x))));
    }
    out.put_wo(layer, weights);
    all.emplace_back(weights.begin(), weights.end());
  }
  return all;
}

}  // namespace

void synth(const std::string& path, const synth_options& options) {
  const synth_options o = resolve(options);
  const model_info model = make_model(o);
  writer out(path, model, "kvreplay synth");
  const std::vector<std::vector<double>> wo = make_wo(out, o);
  for (int number = 0; number < o.sequences; ++number) {
    sequence_maker(out, o, model, number).write(wo);
  }
  out.finish();
}

}  // namespace kvreplay::traces
