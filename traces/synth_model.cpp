#include "traces/synth_model.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvreplay::traces {

namespace {

constexpr double ln2 = 0.693147180559945309417;

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::uint64_t stream_of(int layer, int head, int what) {
  return static_cast<std::uint64_t>(layer) * 4096u * 64u + static_cast<std::uint64_t>(head) * 64u +
         static_cast<std::uint64_t>(what);
}

void normalise(std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  const double scale = sum > 0 ? 1 / std::sqrt(sum) : 0;
  for (double& value : x) value *= scale;
}

// cos and sin of an angle below pi from the half-angle formulas of a rational tangent t = tan(a/2),
// advanced step by step: a rotation needs no library function.
struct rotor {
  double c, s, step_c, step_s;
  explicit rotor(double half_tangent)
      : c(1),
        s(0),
        step_c((1 - half_tangent * half_tangent) / (1 + half_tangent * half_tangent)),
        step_s(2 * half_tangent / (1 + half_tangent * half_tangent)) {}
  void advance() {
    const double next = c * step_c - s * step_s;
    s = s * step_c + c * step_s;
    c = next;
    const double norm = 1 / std::sqrt(c * c + s * s);
    c *= norm;
    s *= norm;
  }
};

// Channels: [0] a bias that every query reads; then pairs (cos, sin) whose products fall with the
// distance of two positions; the rest is content.
struct channels {
  int pairs, content;
  explicit channels(int dim)
      : pairs(dim >= 12 ? 2 : (dim >= 4 ? 1 : 0)), content(dim - 1 - 2 * pairs) {}
};

// The first terms of the triangle wave 1 - distance / horizon: (4 / pi^2) / (2j + 1)^2 each, so
// that the score falls by `locality` nats a position over the whole trace.
std::vector<double> locality_amplitudes(const synth_options& o, int pairs) {
  std::vector<double> amplitudes;
  const double range = o.locality * static_cast<double>(o.tokens);
  for (int j = 0; j < pairs; ++j) {
    const double odd = 2 * j + 1;
    amplitudes.push_back(range * 0.405284734569351 / (odd * odd));
  }
  return amplitudes;
}

class head_maker {
 public:
  head_maker(std::uint64_t seed, int layer, int kv_head, const synth_options& options)
      : seed_(seed), base_(stream_of(layer, kv_head, 0)), o_(options), at_(options.head_dim) {
    // softmax_scale is 1 / sqrt(d): both sides take the fourth root, so that scores are in nats.
    unit_ = std::sqrt(std::sqrt(static_cast<double>(o_.head_dim)));
    amplitudes_ = locality_amplitudes(o_, at_.pairs);
    for (int j = 0; j < at_.pairs; ++j) {
      // tan(a / 2) ~ a / 2 with a = (2j + 1) pi / tokens.
      rotors_.emplace_back((2 * j + 1) * 1.5707963267948966 / static_cast<double>(o_.tokens));
    }
    topic_ = direction(10, 0);
    for (int h = 0; h < o_.q_heads / o_.kv_heads; ++h) taste_.push_back(direction(17, h));
  }

  // The topic moves on, and with it what the queries ask for.
  void advance(std::int64_t t) {
    for (int c = 0; c < at_.content; ++c) {
      topic_[static_cast<size_t>(c)] += o_.drift * noise(11, t * at_.content + c);
    }
    normalise(topic_);
    if (t == 0) return;
    for (rotor& r : rotors_) r.advance();
  }

  void add_key(std::int64_t t, bool heavy) {
    double here = 0;  // the locality term at distance 0
    for (const double a : amplitudes_) here += a;
    // The sink and the heavy hitters carry no locality: they draw at every distance.
    const bool everywhere = t == 0 || heavy;
    const double draw = t == 0 ? o_.sink : o_.heavy;
    out_.k.push_back(unit_ * (everywhere ? here + draw : 0.3 * noise(13, t)));
    for (const rotor& r : rotors_) {
      out_.k.push_back(everywhere ? 0 : unit_ * r.c);
      out_.k.push_back(everywhere ? 0 : unit_ * r.s);
    }
    const std::vector<double> own = direction(12, t);
    for (size_t c = 0; c < own.size(); ++c)
      out_.k.push_back(unit_ * (0.6 * topic_[c] + 0.8 * own[c]));
  }

  // A sink's value is small, as in trained models; the others vary in size.
  void add_value(std::int64_t t) {
    const double size = t == 0 ? 0.05 : 0.5 + uniform(14, t);
    for (int c = 0; c < o_.value_dim; ++c) {
      out_.v.push_back(size * noise(15, t * o_.value_dim + c));
    }
  }

  void add_queries(std::int64_t t, double peakedness) {
    const auto group = static_cast<std::int64_t>(taste_.size());
    for (std::int64_t h = 0; h < group; ++h) {
      out_.q.push_back(unit_);
      for (size_t j = 0; j < rotors_.size(); ++j) {
        out_.q.push_back(unit_ * amplitudes_[j] * rotors_[j].c);
        out_.q.push_back(unit_ * amplitudes_[j] * rotors_[j].s);
      }
      std::vector<double> ask = direction(18, t * group + h);
      for (size_t c = 0; c < ask.size(); ++c) {
        ask[c] = topic_[c] + 0.5 * taste_[static_cast<size_t>(h)][c] + 0.5 * ask[c];
      }
      normalise(ask);
      const double strength = (1 + 5 * peakedness) * (0.5 + uniform(16, h));
      for (const double a : ask) out_.q.push_back(unit_ * strength * a);
    }
  }

  synth_head take() && { return std::move(out_); }

 private:
  double noise(int what, std::int64_t index) const {
    return synth_normal(seed_, base_ + static_cast<std::uint64_t>(what),
                        static_cast<std::uint64_t>(index));
  }
  double uniform(int what, std::int64_t index) const {
    return synth_uniform(seed_, base_ + static_cast<std::uint64_t>(what),
                         static_cast<std::uint64_t>(index));
  }
  std::vector<double> direction(int what, std::int64_t index) const {
    std::vector<double> x;
    for (int c = 0; c < at_.content; ++c) x.push_back(noise(what, index * at_.content + c));
    normalise(x);
    return x;
  }

  std::uint64_t seed_, base_;
  const synth_options& o_;
  channels at_;
  double unit_ = 1;
  std::vector<double> amplitudes_, topic_;
  std::vector<std::vector<double>> taste_;  // what each query head of the group prefers
  std::vector<rotor> rotors_;
  synth_head out_;
};

}  // namespace

double synth_uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const std::uint64_t key = mix(seed + 0x9e3779b97f4a7c15u);
  const std::uint64_t bits = mix(mix(key ^ mix(stream + 0x632be59bd9b4e019u)) + index);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

double synth_normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  double sum = -6;
  for (std::uint64_t i = 0; i < 12; ++i) sum += synth_uniform(seed, stream, 12 * index + i);
  return sum;
}

double portable_exp(double x) {
  if (x < -700) return 0;
  const double n = std::floor(x * (1 / ln2) + 0.5);
  const double r = x - n * ln2;  // |r| <= 0.35, so 14 terms reach double's precision
  constexpr double inverse_factorials[] = {1.0 / 6227020800,
                                           1.0 / 479001600,
                                           1.0 / 39916800,
                                           1.0 / 3628800,
                                           1.0 / 362880,
                                           1.0 / 40320,
                                           1.0 / 5040,
                                           1.0 / 720,
                                           1.0 / 120,
                                           1.0 / 24,
                                           1.0 / 6,
                                           1.0 / 2,
                                           1.0,
                                           1.0};
  double sum = 0;
  for (const double term : inverse_factorials) sum = sum * r + term;
  return sum * std::bit_cast<double>(static_cast<std::uint64_t>(static_cast<std::int64_t>(n) + 1023)
                                     << 52);
}

double portable_log(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);  // [0.5, 1)
  if (m < 0.70710678118654752) {
    m *= 2;
    --exponent;
  }
  const double z = (m - 1) / (m + 1), z2 = z * z;  // ln m = 2 atanh z, |z| < 0.18
  double power = z, sum = 0;
  for (int i = 1; i <= 23; i += 2) {
    sum += power / i;
    power *= z2;
  }
  return 2 * sum + exponent * ln2;
}

std::vector<double> synth_peakedness(std::uint64_t seed, std::int64_t tokens) {
  std::vector<double> z(static_cast<size_t>(tokens));
  double state = synth_normal(seed, 1, 0);
  for (size_t t = 0; t < z.size(); ++t) {
    // Stationary with variance 1 and a memory of about ten steps.
    state = 0.9 * state + 0.435889894354067 * synth_normal(seed, 1, t + 1);
    z[t] = std::clamp(0.5 + 0.3 * state, 0.0, 1.0);
  }
  return z;
}

std::vector<bool> synth_heavy(std::uint64_t seed, const synth_options& options) {
  std::vector<bool> heavy(static_cast<size_t>(options.tokens), false);
  for (size_t t = 1; t < heavy.size(); ++t) {
    heavy[t] = synth_uniform(seed, 2, t) < options.heavy_share;
  }
  return heavy;
}

synth_head make_synth_head(std::uint64_t seed, int layer, int kv_head, const synth_options& options,
                           const std::vector<double>& peakedness, const std::vector<bool>& heavy) {
  head_maker maker(seed, layer, kv_head, options);
  for (std::int64_t t = 0; t < options.tokens; ++t) {
    const auto at = static_cast<size_t>(t);
    maker.advance(t);
    maker.add_key(t, heavy[at]);
    maker.add_value(t);
    maker.add_queries(t, peakedness[at]);
  }
  return std::move(maker).take();
}

}  // namespace kvreplay::traces
